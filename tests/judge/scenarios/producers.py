"""Producers: names, access modes, sequence ids."""

import threading

import pulsar

from world import eventually, outcome_of, scenario, take, texts

MODE = pulsar.ProducerAccessMode


@scenario
def a_name_is_taken_by_one_at_a_time(world):
    first = world.producer(producer_name="p")
    seen = {"taken": outcome_of(lambda: world.producer(producer_name="p", client=world.new_client()))}
    first.close()
    seen["free again"] = outcome_of(lambda: world.producer(producer_name="p", client=world.new_client()))
    unnamed = [world.producer().producer_name() for _ in range(3)]
    return seen | {"given names differ": len(set(unnamed)) == 3, "and are names": all(unnamed)}


@scenario
def exclusive_producers(world):
    seen = {}
    shared = world.producer()
    seen["exclusive beside a shared one"] = outcome_of(lambda: world.producer(access_mode=MODE.Exclusive))
    shared.close()
    exclusive = world.producer(access_mode=MODE.Exclusive)
    other = world.new_client()
    seen["a second exclusive one"] = outcome_of(lambda: world.producer(access_mode=MODE.Exclusive, client=other))
    seen["a shared one beside it"] = outcome_of(lambda: world.producer(client=other))
    exclusive.send(b"mine")
    exclusive.close()
    seen["then a shared one"] = outcome_of(lambda: world.producer(client=other))
    return seen


@scenario
def waiting_for_exclusive(world):
    first = world.producer(access_mode=MODE.Exclusive)
    got, client = [], world.new_client()

    def wait():
        producer = client.create_producer(world.topic(), access_mode=MODE.WaitForExclusive)
        got.append(producer)
        producer.send(b"second")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    consumer = world.consumer()
    first.send(b"first")
    thread.join(1)
    seen = {"it waits": thread.is_alive()}
    first.close()
    thread.join(30)
    return seen | {"it got its turn": bool(got), "messages": texts(consumer, 2, ack=True)}


@scenario
def fencing_takes_over(world):
    first = world.producer(access_mode=MODE.Exclusive)
    first.send(b"first")
    second = world.producer(access_mode=MODE.ExclusiveWithFencing, client=world.new_client())
    second.send(b"second")
    # The client takes a while to notice that it was put out.
    fenced = eventually(lambda: (tried := outcome_of(lambda: first.send(b"late"))) != "done" and tried)
    consumer = world.consumer()
    return {"messages": texts(consumer, 2), "the first": fenced}


@scenario
def sequence_ids_start_anew_without_deduplication(world):
    producer = world.producer(producer_name="p")
    before = producer.last_sequence_id()
    for _ in range(3):
        producer.send(b"a")
    last = producer.last_sequence_id()
    producer.close()
    again = world.producer(producer_name="p")
    found = again.last_sequence_id()
    again.send(b"b")
    consumer = world.consumer()
    got = [message.data().decode() for message in take(consumer, 4)]
    return {"before": before, "last": last, "again": found, "messages": got}
