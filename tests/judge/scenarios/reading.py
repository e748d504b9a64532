"""Readers, seeking, the last message's id, compacted views."""

import time

import pulsar

from world import drain, eventually, outcome_of, read_all, scenario, take, text, texts


def send(producer, *wanted) -> list:
    return [producer.send(str(one).encode()) for one in wanted]


@scenario
def readers_start_where_they_are_told_to(world):
    producer = world.producer()
    ids = send(producer, *"abcd")
    latest = world.reader(start=pulsar.MessageId.latest)
    seen = {
        "earliest": read_all(world.reader()),
        "behind b": read_all(world.reader(start=ids[1])),
        "from b": read_all(world.reader(start=ids[1], start_message_id_inclusive=True)),
        "behind the last": read_all(world.reader(start=ids[3])),
        "latest": latest.has_message_available(),
    }
    send(producer, "e")
    return seen | {"then": text(latest.read_next(30_000)), "more": latest.has_message_available()}


@scenario
def readers_start_in_a_batch(world):
    producer = world.producer(batching_enabled=True, batching_max_messages=6, batching_max_publish_delay_ms=2000)
    ids = []
    for number in range(6):
        producer.send_async(str(number).encode(), lambda result, message_id: ids.append(message_id))
    producer.flush()
    eventually(lambda: len(ids) == 6)
    return {
        "behind 2": read_all(world.reader(start=ids[2])),
        "from 2": read_all(world.reader(start=ids[2], start_message_id_inclusive=True)),
    }


@scenario
def readers_leave_nothing_behind(world):
    producer = world.producer()
    send(producer, "a", "b")
    for _ in range(2):
        reader = world.reader()
        read_all(reader)
        reader.close()
    return {"again": read_all(world.reader())}


@scenario
def seeking_by_id(world):
    ids = send(world.producer(), *"abcdef")
    consumer = world.consumer()
    texts(consumer, 6, ack=True)
    consumer.seek(ids[2])
    seen = {"to c": [text(message) for message in drain(consumer, ack=True)]}
    consumer.seek(pulsar.MessageId.earliest)
    seen["to the start"] = [text(message) for message in drain(consumer)]
    consumer.seek(pulsar.MessageId.latest)
    seen["to the end"] = [text(message) for message in drain(consumer)]
    reader = world.reader()
    reader.seek(ids[4])
    return seen | {"reader": read_all(reader)}


@scenario
def seeking_by_time(world):
    producer = world.producer()
    send(producer, "a", "b")
    time.sleep(0.3)
    between = int(time.time() * 1000)
    time.sleep(0.3)
    send(producer, "c", "d")
    consumer = world.consumer()
    texts(consumer, 4, ack=True)
    consumer.seek(between)
    seen = {"between": [text(message) for message in drain(consumer, ack=True)]}
    consumer.seek(0)
    seen["long ago"] = [text(message) for message in drain(consumer, ack=True)]
    consumer.seek(int(time.time() * 1000) + 60_000)
    seen["to come"] = [text(message) for message in drain(consumer)]
    reader = world.reader()
    reader.seek(between)
    return seen | {"reader": read_all(reader)}


@scenario
def seeking_forgets_single_acknowledgements(world):
    ids = send(world.producer(), *"abcd")
    consumer = world.consumer(kind=pulsar.ConsumerType.Shared)
    messages = take(consumer, 4)
    consumer.acknowledge(messages[1])
    consumer.acknowledge(messages[3])
    time.sleep(0.3)
    consumer.seek(ids[0])
    return {"again": sorted(text(message) for message in drain(consumer))}


@scenario
def the_last_message_has_an_id(world):
    producer, consumer = world.producer(), world.consumer()
    empty = consumer.get_last_message_id()
    ids = send(producer, *"abc")
    last = consumer.get_last_message_id()
    return {
        "empty": [empty.ledger_id(), empty.entry_id()],
        "the last sent": last.ledger_id() == ids[2].ledger_id() and last.entry_id() == ids[2].entry_id(),
        "entries": [one.entry_id() - ids[0].entry_id() for one in ids],
    }


@scenario
def compaction_keeps_the_last_of_each_key(world):
    topic = world.topic("versions")
    producer = world.producer(topic)
    for number in range(20):
        producer.send(str(number).encode(), partition_key=f"k{number % 4}")
    # Nothing of this key is left. Apache Pulsar sees that a message is empty only by a size that this client writes
    # when it compresses.
    world.producer(topic, compression_type=pulsar.CompressionType.LZ4).send(b"", partition_key="k3")
    producer.send(b"without a key")
    producer.send(b"last", partition_key="k2")
    world.broker.compact(topic)
    producer.send(b"new", partition_key="k9")

    def compacted():
        found = read_all(world.reader(topic, is_read_compacted=True))
        return found if len(found) < 10 else None

    consumer = world.consumer(topic, subscription="compacted", is_read_compacted=True)
    return {
        "reader": eventually(compacted),
        "consumer": [text(message) for message in drain(consumer)],
        "everything is still there": read_all(world.reader(topic)),
        "on a shared one": outcome_of(
            lambda: world.consumer(topic, "s2", kind=pulsar.ConsumerType.Shared, is_read_compacted=True)
        ),
    }


@scenario
def compaction_loses_nothing_in_batches(world):
    """What is in a batch may be compacted or not: whoever keeps the last of each key sees the same."""
    topic = world.topic("versions")
    producer = world.producer(topic, batching_enabled=True, batching_max_messages=4, batching_max_publish_delay_ms=2000)
    for number in range(16):
        producer.send_async(str(number).encode(), lambda result, message_id: None, partition_key=f"k{number % 3}")
    producer.flush()
    world.broker.compact(topic)

    reader, table = world.reader(topic, is_read_compacted=True), {}
    while reader.has_message_available():
        message = reader.read_next(30_000)
        # This client shows the places of messages that a batch has lost, as empty ones.
        if message.data():
            table[message.partition_key()] = text(message)
    return {"table": table}


@scenario
def a_table_view_has_the_last_of_each_key(world):
    topic = world.topic("versions")
    producer = world.producer(topic)
    for number in range(12):
        producer.send(str(number).encode(), partition_key=f"k{number % 4}")
    view = world.client.create_table_view(topic)
    before = {key: view.get(key).decode() for key in ("k0", "k1", "k2", "k3")}
    producer.send(b"new", partition_key="k0")
    after = eventually(lambda: view.get("k0") == b"new")
    return {"before": before, "after": after, "size": len(view)}
