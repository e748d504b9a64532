"""Key_Shared subscriptions: a key is at one consumer at a time, and its messages stay in order."""

import pulsar
from pulsar import ConsumerKeySharedPolicy, KeySharedMode

from world import drain, outcome_of, scenario, take, text

KIND = pulsar.ConsumerType.KeyShared
KEYS = [f"k{number}" for number in range(32)]


def join(world, name, **options):
    return world.consumer(kind=KIND, consumer_name=name, client=world.new_client(), **options)


def send(producer, rounds, keys=KEYS, ordering=False):
    for number in rounds:
        for key in keys:
            keyed = {"ordering_key": key, "partition_key": "other"} if ordering else {"partition_key": key}
            producer.send(f"{key}:{number}".encode(), **keyed)


def by_key(messages) -> dict[str, list[int]]:
    found = {}
    for message in messages:
        key, number = text(message).split(":")
        found.setdefault(key, []).append(int(number))
    return found


@scenario
def each_key_is_at_one_consumer_and_in_order(world):
    consumers = [join(world, f"c{number}") for number in range(3)]
    send(world.producer(), range(5))
    found = [by_key(drain(consumer, ack=True)) for consumer in consumers]
    return {
        "keys": sum(map(len, found)),
        "everyone has some": all(found),
        "in order": all(numbers == [0, 1, 2, 3, 4] for mine in found for numbers in mine.values()),
    }


@scenario
def the_ordering_key_decides_before_the_partition_key(world):
    consumers = [join(world, f"c{number}") for number in range(3)]
    send(world.producer(), range(3), ordering=True)
    found = [by_key(drain(consumer, ack=True)) for consumer in consumers]
    return {"keys": sum(map(len, found)), "everyone has some": all(found)}


@scenario
def messages_without_a_key_have_one_consumer(world):
    consumers = [join(world, f"c{number}") for number in range(3)]
    producer = world.producer()
    for number in range(20):
        producer.send(str(number).encode())
    found = [[text(message) for message in drain(consumer, ack=True)] for consumer in consumers]
    return {"all": sorted(map(int, sum(found, []))) == list(range(20)), "consumers": sum(map(bool, found))}


@scenario
def sticky_ranges_say_who_gets_what(world):
    def sticky(*ranges, **options):
        return ConsumerKeySharedPolicy(KeySharedMode.Sticky, options.get("out_of_order", False), list(ranges))

    low = join(world, "low", key_shared_policy=sticky((0, 16383), (49152, 65535)))
    high = join(world, "high", key_shared_policy=sticky((16384, 49151)))
    seen = {
        "overlapping": outcome_of(lambda: join(world, "x", key_shared_policy=sticky((100, 200)))),
        "auto split beside sticky": outcome_of(lambda: join(world, "y")),
    }
    send(world.producer(), range(3))
    seen["low"], seen["high"] = by_key(drain(low, ack=True)), by_key(drain(high, ack=True))
    high.close()
    send(world.producer(), [3])
    seen["high is away"] = by_key(drain(low, ack=True))
    high = join(world, "again", key_shared_policy=sticky((16384, 49151)))
    return seen | {"high is back": by_key(drain(high, ack=True))}


@scenario
def keys_of_one_who_leaves_go_on_in_order(world):
    consumers = [join(world, f"c{number}") for number in range(3)]
    producer = world.producer()
    send(producer, range(4))
    held = [drain(consumer) for consumer in consumers]
    # Of each key the first message is done, but for what the leaver holds.
    for consumer, messages in zip(consumers, held):
        for message in messages:
            if text(message).endswith(":0") and consumer is not consumers[0]:
                consumer.acknowledge(message)
    gone = set(by_key(held[0]))
    consumers[0].close()
    found = [by_key(drain(consumer)) for consumer in consumers[1:]]
    moved = {key: numbers for mine in found for key, numbers in mine.items() if key in gone}
    return {
        "some were at the leaver": bool(gone),
        "all of them moved": set(moved) == gone,
        "whole and in order": all(numbers == [0, 1, 2, 3] for numbers in moved.values()),
        "at one each": len(set(found[0]) & set(found[1])),
        "others were left alone": all(key in gone for mine in found for key in mine),
    }


@scenario
def a_key_that_is_held_moves_when_it_is_let_go(world):
    first = join(world, "a")
    producer = world.producer()
    send(producer, range(3))
    held = take(first, 3 * len(KEYS))
    second = join(world, "b")
    send(producer, range(3, 5))
    at_first, early = drain(first), drain(second)
    stayed = set(by_key(at_first))
    for message in held:
        first.acknowledge(message)
    late = by_key(drain(second, ack=True))
    more = by_key(drain(first))
    return {
        "the second gets none of what is held": by_key(early),
        "some stayed and went on": bool(stayed) and all(n == [3, 4] for n in by_key(at_first).values()),
        "some moved, in order": bool(late) and all(numbers == [3, 4] for numbers in late.values()),
        "each at one": sorted((stayed | set(more)) & set(late)),
        "all": len(stayed | set(more) | set(late)) == len(KEYS),
    }


@scenario
def a_key_that_is_handed_back_comes_whole_at_its_new_consumer(world):
    # The nearest redelivery that the client offers.
    first = join(world, "a", negative_ack_redelivery_delay_ms=100)
    producer = world.producer()
    send(producer, range(3))
    held = take(first, 3 * len(KEYS))
    second = join(world, "b")
    for message in held:
        first.negative_acknowledge(message)
    found = by_key(drain(second, quiet_ms=2000))
    again = by_key(drain(first))
    return {
        "some moved": bool(found),
        "whole and in order": all(numbers == [0, 1, 2] for numbers in [*found.values(), *again.values()]),
        "each at one": sorted(set(found) & set(again)),
        "all": len(set(found) | set(again)) == len(KEYS),
    }
