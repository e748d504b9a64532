"""Who gets which message: Exclusive, Shared and Failover subscriptions, and subscriptions by pattern."""

import re

import pulsar

from world import drain, eventually, outcome_of, scenario, take, text, texts

EXCLUSIVE, SHARED = pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared
FAILOVER, KEY_SHARED = pulsar.ConsumerType.Failover, pulsar.ConsumerType.KeyShared
# A broker may let a second pass before the next consumer is the active one.
SWITCH_MS = 2500


def send(producer, *wanted):
    for one in wanted:
        producer.send(str(one).encode())


@scenario
def exclusive_admits_one(world):
    producer, first = world.producer(), world.consumer()
    seen = {"second": outcome_of(lambda: world.consumer(client=world.new_client()))}
    for kind in (SHARED, FAILOVER, KEY_SHARED):
        seen[f"then {kind.name}"] = outcome_of(lambda: world.consumer(kind=kind, client=world.new_client()))
    seen["another subscription"] = outcome_of(lambda: world.consumer(subscription="other"))
    send(producer, 1, 2)
    seen["got"] = texts(first, 2, ack=True)
    first.close()
    second = world.consumer()
    send(producer, 3)
    return seen | {"after close": [text(message) for message in drain(second)]}


@scenario
def shared_spreads_and_gives_each_message_once(world):
    # Queues of one: nobody can take all.
    consumers = [world.consumer(kind=SHARED, receiver_queue_size=1, consumer_name=f"c{n}") for n in range(3)]
    send(world.producer(), *range(30))
    found, turns = [[], [], []], 0
    while sum(map(len, found)) < 30 and turns < 300:
        for consumer, mine in zip(consumers, found):
            try:
                message = consumer.receive(200)
            except pulsar.Timeout:
                continue
            consumer.acknowledge(message)
            mine.append(int(text(message)))
        turns += 1
    return {
        "all once": sorted(sum(found, [])) == list(range(30)),
        "everyone got some": all(found),
        "in order at each": all(mine == sorted(mine) for mine in found),
        "exclusive beside them": outcome_of(lambda: world.consumer(client=world.new_client())),
    }


@scenario
def shared_gives_what_a_leaver_held_to_others(world):
    leaver, stayer = world.consumer(kind=SHARED, consumer_name="a"), None
    send(world.producer(), *range(10))
    held = take(leaver, 10)
    for message in held[:4]:
        leaver.acknowledge(message)
    stayer = world.consumer(kind=SHARED, consumer_name="b")
    before = drain(stayer)
    leaver.close()
    after = take(stayer, 6)
    return {
        "before": [text(message) for message in before],
        "after": [text(message) for message in after],
        "counts": sorted(message.redelivery_count() for message in after),
        "more": len(drain(stayer)),
    }


def failover(world, names) -> dict:
    return {name: world.consumer(kind=FAILOVER, consumer_name=name, client=world.new_client()) for name in names}


@scenario
def failover_has_one_active_consumer(world):
    """Which one is the broker's choice; that it is one, and that another goes on in its place, is not."""
    producer, consumers, seen = world.producer(), failover(world, "abc"), []
    send(producer, 1, 2, 3, 4)
    for number in range(5, 8):
        got = {name: [text(message) for message in drain(one, quiet_ms=SWITCH_MS)] for name, one in consumers.items()}
        active = [name for name, messages in got.items() if messages]
        seen.append([got[name] for name in active])
        for name in active:
            consumers.pop(name).close()
        send(producer, number)
    (new,) = failover(world, "d").values()
    return {
        "the active ones": seen,
        "all are gone": not consumers,
        "a new one": texts(new, 7, ack=True),
        "exclusive beside it": outcome_of(lambda: world.consumer(client=world.new_client())),
    }


@scenario
def failover_goes_on_behind_what_was_acknowledged(world):
    consumers = failover(world, "ab")
    send(world.producer(), *range(6))
    got = {name: drain(one) for name, one in consumers.items()}
    active = max(got, key=lambda name: len(got[name]))
    one = consumers.pop(active)
    one.acknowledge_cumulative(got[active][3])
    one.close()
    (two,) = consumers.values()
    return {"counts": sorted(map(len, got.values())), "then": texts(two, 2), "more": len(drain(two))}


@scenario
def regex_subscriptions_cover_what_matches(world):
    # The client looks for topics that come later once a minute, whatever it is told: too long to wait for here.
    name = world.topic()
    for topic in ("a", "b"):
        send(world.producer(f"{name}-in-{topic}"), topic)
    send(world.producer(f"{name}-out-a"), "not this")
    pattern = re.compile(f"persistent://public/default/{name}-in-.*")
    consumer = world.consumer(pattern)
    found = sorted(texts(consumer, 2, ack=True))
    consumer.close()
    send(world.producer(f"{name}-in-c"), "c")
    again = world.consumer(pattern)
    return {"found": found, "again": texts(again, 1, ack=True), "more": len(drain(again))}


@scenario
def several_topics_at_once(world):
    names = [world.topic(name) for name in "ab"]
    consumer = world.client.subscribe(names, "s", initial_position=pulsar.InitialPosition.Earliest)
    for name in names:
        send(world.producer(name), name)
    return {"found": sorted(texts(consumer, 2, ack=True)) == sorted(names)}


@scenario
def unsubscribing_forgets_what_was_acknowledged(world):
    producer, consumer = world.producer(), world.consumer()
    send(producer, 1, 2)
    acknowledged = texts(consumer, 2, ack=True)
    consumer.unsubscribe()
    again = world.consumer()
    seen = {"acknowledged": acknowledged, "again": texts(again, 2)}
    other = [world.consumer(subscription="shared", kind=SHARED, consumer_name=f"c{n}") for n in range(2)]
    seen["while another is there"] = outcome_of(other[0].unsubscribe)
    return seen


@scenario
def a_subscription_at_the_end_sees_only_what_comes(world):
    producer = world.producer()
    send(producer, "old")
    consumer = world.consumer(initial_position=pulsar.InitialPosition.Latest)
    send(producer, "new")
    return {"found": texts(consumer, 1), "more": len(drain(consumer))}


@scenario
def an_empty_topic_has_nothing(world):
    consumer = world.consumer()
    reader = world.reader()
    return {
        "received": outcome_of(lambda: consumer.receive(300)),
        "available": reader.has_message_available(),
        "last id": [consumer.get_last_message_id().ledger_id(), consumer.get_last_message_id().entry_id()],
        "connected": eventually(consumer.is_connected),
    }
