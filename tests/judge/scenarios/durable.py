"""What outlasts a broker that was killed, and how clients come back to it."""

import time

import pulsar

from world import PATIENCE_MS, drain, read_all, scenario, take, text, texts


@scenario
def a_restart_loses_nothing_and_clients_come_back(world):
    producer, consumer = world.producer(), world.consumer()
    for number in range(5):
        producer.send(str(number).encode())
    before = take(consumer, 5)
    last = before[-1].message_id()
    world.broker.kill()
    world.broker.start()
    producer.send(b"after")
    # What was not acknowledged comes again, and behind it what is new.
    found = texts(consumer, 6, ack=True)
    new = world.producer().send(b"more")
    return {
        "found": found,
        "then": texts(consumer, 1),
        "everything": read_all(world.reader()),
        "ids rise": last < new,
    }


@scenario
def keyed_work_goes_on_after_a_restart(world):
    kind = pulsar.ConsumerType.KeyShared
    consumers = [world.consumer(kind=kind, consumer_name=f"c{n}", client=world.new_client()) for n in range(2)]
    producer = world.producer()
    keys = [f"k{number}" for number in range(16)]
    for key in keys:
        producer.send(key.encode(), partition_key=key)
    for consumer in consumers:
        drain(consumer)
    world.broker.kill()
    world.broker.start()
    for key in keys:
        producer.send(f"{key}-again".encode(), partition_key=key)
    # Each client comes back when it does; whoever is first may get the keys of both until the other is there.
    found = []
    give_up = time.monotonic() + PATIENCE_MS / 1000
    while len(found) < 2 * len(keys) and time.monotonic() < give_up:
        for consumer in consumers:
            found += map(text, drain(consumer, ack=True, quiet_ms=500))
    for consumer in consumers:
        found += map(text, drain(consumer, ack=True))
    return {
        "all": sorted(set(found)) == sorted(keys + [f"{key}-again" for key in keys]),
        "each once": len(found),
        "in order": all(found.index(key) < found.index(f"{key}-again") for key in keys),
    }


@scenario
def a_reader_goes_on_after_a_restart(world):
    producer, reader = world.producer(), world.reader()
    for number in range(3):
        producer.send(str(number).encode())
    before = [text(reader.read_next(30_000)) for _ in range(3)]
    world.broker.kill()
    world.broker.start()
    producer.send(b"3")
    return {"before": before, "after": text(reader.read_next(60_000)), "more": reader.has_message_available()}
