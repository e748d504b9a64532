"""Acknowledging: one by one, cumulatively, negatively, in batches; what comes again, and how often it came."""

import time

import pulsar

from world import drain, outcome_of, scenario, take, text, texts

SHARED = pulsar.ConsumerType.Shared


def send(producer, *wanted):
    for one in wanted:
        producer.send(str(one).encode())


@scenario
def single_acknowledgements_leave_holes(world):
    consumer = world.consumer(kind=SHARED)
    send(world.producer(), *range(10))
    for message in take(consumer, 10):
        if int(text(message)) not in (2, 3, 7):
            consumer.acknowledge(message)
    consumer.close()
    again = take(world.consumer(kind=SHARED), 3)
    return {"again": [text(message) for message in again]}


@scenario
def cumulative_acknowledgements_cover_what_is_before(world):
    consumer = world.consumer()
    send(world.producer(), *range(8))
    messages = take(consumer, 8)
    consumer.acknowledge_cumulative(messages[4])
    consumer.acknowledge(messages[6])
    consumer.close()
    again = world.consumer()
    found = texts(again, 2)
    shared = world.consumer(subscription="shared", kind=SHARED)
    one = take(shared, 1)[0]
    return {
        "again": found,
        "more": len(drain(again)),
        "on a shared one": outcome_of(lambda: shared.acknowledge_cumulative(one)),
    }


@scenario
def negative_acknowledgements_count(world):
    consumer = world.consumer(kind=SHARED, negative_ack_redelivery_delay_ms=100)
    send(world.producer(), "a", "b")
    seen = []
    for message in take(consumer, 2):
        consumer.acknowledge(message) if text(message) == "a" else consumer.negative_acknowledge(message)
    for _ in range(3):
        message = take(consumer, 1)[0]
        seen.append([text(message), message.redelivery_count()])
        consumer.negative_acknowledge(message)
    last = take(consumer, 1, ack=True)[0]
    return {"seen": seen, "last": last.redelivery_count(), "more": len(drain(consumer))}


@scenario
def negative_acknowledgements_on_an_exclusive_subscription(world):
    consumer = world.consumer(negative_ack_redelivery_delay_ms=100)
    send(world.producer(), *range(4))
    messages = take(consumer, 4)
    for index in (0, 1, 3):
        consumer.acknowledge(messages[index])
    consumer.negative_acknowledge(messages[2])
    again = take(consumer, 1)[0]
    return {"again": [text(again), again.redelivery_count()], "more": len(drain(consumer))}


@scenario
def everything_unacknowledged_comes_again_when_asked_for(world):
    seen = {}
    for kind in (pulsar.ConsumerType.Exclusive, SHARED):
        consumer = world.consumer(subscription=kind.name, kind=kind)
        if not seen:
            send(world.producer(), *range(5))
        messages = take(consumer, 5)
        consumer.acknowledge(messages[1])
        # The acknowledgement is on its way before the next question.
        time.sleep(0.3)
        consumer.redeliver_unacknowledged_messages()
        again = take(consumer, 4)
        seen[kind.name] = [sorted(text(message) for message in again), len(drain(consumer))]
    return seen


@scenario
def a_batch_is_acknowledged_when_all_of_it_is(world):
    producer = world.producer(batching_enabled=True, batching_max_messages=5, batching_max_publish_delay_ms=2000)
    for number in range(10):
        producer.send_async(str(number).encode(), lambda result, message_id: None)
    producer.flush()
    consumer = world.consumer(kind=SHARED)
    for message in take(consumer, 10):
        if int(text(message)) not in (1, 2):
            consumer.acknowledge(message)
    consumer.close()
    again = world.consumer(kind=SHARED)
    return {"again": sorted(texts(again, 5)), "more": len(drain(again))}


@scenario
def what_is_refused_too_often_goes_to_the_dead_letters(world):
    dead = world.topic("dead")
    policy = pulsar.ConsumerDeadLetterPolicy(2, dead, "keep")
    options = {"kind": SHARED, "negative_ack_redelivery_delay_ms": 100, "dead_letter_policy": policy}
    consumer = world.consumer(**options)
    letters = world.consumer(dead, subscription="letters")
    send(world.producer(), "bad")
    tries = 0
    while tries < 3:
        consumer.negative_acknowledge(take(consumer, 1)[0])
        tries += 1
    return {"tries": tries, "dead": texts(letters, 1), "more": len(drain(consumer))}


@scenario
def acknowledgements_survive_a_new_client(world):
    first = world.new_client()
    consumer = world.consumer(client=first)
    send(world.producer(), *range(6))
    texts(consumer, 3, ack=True)
    consumer.close()
    found = world.consumer(client=world.new_client())
    return {"then": texts(found, 3), "more": len(drain(found))}
