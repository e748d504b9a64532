"""What a message carries: everything that a producer put on it, whatever it was packed in."""

import hashlib

import pulsar
from pulsar.schema import JsonSchema, Record, String, StringSchema

from world import drain, outcome_of, scenario, take, text, texts

MESSAGE_BYTES_MAX = 5 << 20


@scenario
def produce_and_consume(world):
    consumer, producer = world.consumer(), world.producer(producer_name="writer")
    for number in range(3):
        producer.send(
            f"m{number}".encode(),
            properties={"traceparent": f"00-{number}", "empty": ""},
            partition_key=f"k{number}",
            ordering_key=f"o{number}",
            event_timestamp=1_700_000_000_000 + number,
            sequence_id=10 + 2 * number,
        )
    producer.send(b"")
    producer.send(bytes(range(256)), partition_key="kéy")
    seen = []
    for message in take(consumer, 5):
        keys = [message.partition_key(), message.ordering_key()]
        facts = [keys, message.properties(), message.event_timestamp(), message.redelivery_count()]
        seen.append([message.data().hex(), *facts, message.producer_name(), message.topic_name()])
    return {"messages": seen, "last_sequence_id": producer.last_sequence_id(), "consumer": consumer.topic()}


@scenario
def many_messages_through_a_small_queue(world):
    consumer, producer = world.consumer(receiver_queue_size=7), world.producer(block_if_queue_full=True)
    for number in range(3000):
        producer.send_async(str(number).encode(), lambda result, message_id: None)
    producer.flush()
    found = [int(one) for one in texts(consumer, 3000, ack=True)]
    return {"in_order": found == list(range(3000)), "count": len(found)}


@scenario
def receipts_come_in_order_with_rising_ids(world):
    producer, ids = world.producer(block_if_queue_full=True), []
    for number in range(200):
        producer.send_async(b"x", lambda result, message_id, number=number: ids.append((number, message_id)))
    producer.flush()
    return {
        "order": [number for number, _ in ids] == list(range(200)),
        "rising": all(one < two for (_, one), (_, two) in zip(ids, ids[1:])),
        "distinct": len({str(message_id) for _, message_id in ids}),
        "partition": ids[0][1].partition(),
    }


@scenario
def large_messages(world):
    consumer, producer = world.consumer(), world.producer(send_timeout_millis=20_000)
    seen = {}
    for name, size in {"1 MiB": 1 << 20, "almost": MESSAGE_BYTES_MAX - 1024, "the limit": MESSAGE_BYTES_MAX}.items():
        data = bytes([size % 251]) * size
        seen[name] = outcome_of(lambda: producer.send(data))
        if seen[name] == "done":
            seen[name] = len(take(consumer, 1, ack=True)[0].data())
    seen["above"] = outcome_of(lambda: producer.send(bytes(MESSAGE_BYTES_MAX + 1)))
    producer.send(b"after")
    return seen | {"after": texts(consumer, 1)}


@scenario
def chunked_messages(world):
    consumer = world.consumer()
    producer = world.producer(chunking_enabled=True)
    whole = hashlib.sha256(b"seed").digest() * (12 << 15)
    producer.send(whole, properties={"whole": "yes"})
    producer.send(b"small")
    large, small = take(consumer, 2, ack=True)
    again = world.consumer(subscription="again")
    reread = take(again, 2)
    return {
        "whole": large.data() == whole and large.properties() == {"whole": "yes"},
        "small": text(small),
        "again": [len(message.data()) for message in reread],
    }


@scenario
def batches_with_each_compression(world):
    seen = {}
    for name in ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"):
        topic = world.topic(name.lower())
        consumer = world.consumer(topic)
        producer = world.producer(
            topic,
            compression_type=getattr(pulsar.CompressionType, name),
            batching_enabled=True,
            batching_max_messages=10,
            batching_max_publish_delay_ms=2000,
            block_if_queue_full=True,
        )
        for number in range(40):
            producer.send_async(b"%d " % number * 50, lambda result, message_id: None, properties={"n": str(number)})
        producer.flush()
        messages = take(consumer, 40)
        seen[name] = {
            "in_order": [message.properties()["n"] for message in messages] == [str(n) for n in range(40)],
            "whole": all(text(message) == f"{n} " * 50 for n, message in enumerate(messages)),
            "batch_indexes": [message.message_id().batch_index() for message in messages],
            "entries": len({message.message_id().entry_id() for message in messages}),
        }
    return seen


@scenario
def key_based_batches_keep_keys_apart(world):
    kind = pulsar.ConsumerType.KeyShared
    consumers = [world.consumer(kind=kind, consumer_name=f"c{n}") for n in range(2)]
    producer = world.producer(
        batching_enabled=True,
        batching_type=pulsar.BatchingType.KeyBased,
        batching_max_publish_delay_ms=500,
    )
    for number in range(40):
        producer.send_async(f"{number}".encode(), lambda result, message_id: None, partition_key=f"k{number % 8}")
    producer.flush()
    found = [[(message.partition_key(), int(text(message))) for message in drain(one, ack=True)] for one in consumers]
    keys = [{key for key, _ in one} for one in found]
    return {
        "all": sorted(number for one in found for _, number in one) == list(range(40)),
        "keys_at_both": sorted(keys[0] & keys[1]),
        "in_order": all(
            [n for k, n in one if k == key] == sorted(n for k, n in one if k == key) for one in found for key in keys[0]
        ),
    }


class Point(Record):
    x = String()


@scenario
def schemas(world):
    consumer = world.consumer(schema=StringSchema())
    producer = world.producer(schema=StringSchema())
    producer.send("gradient ∇")
    message = take(consumer, 1)[0]
    seen = {"value": message.value(), "version": [ord(c) for c in message.schema_version()]}
    seen["same schema again"] = outcome_of(lambda: world.producer(schema=StringSchema()))
    seen["another kind of schema"] = outcome_of(lambda: world.producer(schema=JsonSchema(Point)))
    seen["consumer of another kind"] = outcome_of(lambda: world.consumer(subscription="o", schema=JsonSchema(Point)))
    seen["bytes beside it"] = outcome_of(lambda: world.producer())
    points = world.topic("points")
    point = world.producer(points, schema=JsonSchema(Point))
    point.send(Point(x="1"))
    seen["json"] = take(world.consumer(points, schema=JsonSchema(Point)), 1)[0].value().x
    return seen


@scenario
def nonpersistent_topics(world):
    topic = "non-persistent://public/default/" + world.topic()
    producer = world.producer(topic)
    producer.send(b"before anyone listens")
    consumer = world.consumer(topic)
    producer.send(b"heard")
    found = texts(consumer, 1, ack=True)
    return {"found": found, "topic": consumer.topic()}
