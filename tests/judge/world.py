"""What scenarios are played in: a broker, a client, topics of their own, and how to wait.

A scenario gives what it saw as a dictionary of plain values, without ids, times and names that differ from run to run.
What must come is waited for long; that nothing comes can only be told by waiting a little.
"""

import time

import pulsar

PATIENCE_MS = 30_000
QUIET_MS = 700
SCENARIOS = {}


def scenario(function):
    """Marks a function as one."""
    SCENARIOS[function.__name__] = function
    return function


class World:
    def __init__(self, broker, name: str):
        self.broker, self.name, self.closers = broker, name, []
        self.client = self.new_client()

    def new_client(self) -> pulsar.Client:
        quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
        client = pulsar.Client(self.broker.url, operation_timeout_seconds=20, logger=quiet)
        self.closers.append(client.close)
        return client

    def close(self):
        for close in self.closers:
            outcome_of(close)

    def topic(self, name="topic") -> str:
        return f"{self.name.replace('_', '-')}-{name}"

    def producer(self, topic=None, client=None, **options) -> pulsar.Producer:
        return (client or self.client).create_producer(topic or self.topic(), **options)

    def consumer(self, topic=None, subscription="s", kind=pulsar.ConsumerType.Exclusive, client=None, **options):
        """One that starts with the first message."""
        options = {"initial_position": pulsar.InitialPosition.Earliest} | options
        return (client or self.client).subscribe(topic or self.topic(), subscription, consumer_type=kind, **options)

    def reader(self, topic=None, start=pulsar.MessageId.earliest, **options) -> pulsar.Reader:
        return self.client.create_reader(topic or self.topic(), start, **options)


def text(message) -> str:
    return message.data().decode()


def take(consumer, count: int, ack=False) -> list:
    """That many messages, which must come."""
    messages = []
    for _ in range(count):
        message = consumer.receive(PATIENCE_MS)
        if ack:
            consumer.acknowledge(message)
        messages.append(message)
    return messages


def texts(consumer, count: int, ack=False) -> list[str]:
    return [text(message) for message in take(consumer, count, ack)]


def drain(consumer, ack=False, quiet_ms=QUIET_MS) -> list:
    """All messages until none comes any more."""
    messages = []
    while True:
        try:
            message = consumer.receive(quiet_ms)
        except pulsar.Timeout:
            return messages
        if ack:
            consumer.acknowledge(message)
        messages.append(message)


def read_all(reader) -> list[str]:
    """What a reader has before it."""
    found = []
    while reader.has_message_available():
        found.append(text(reader.read_next(PATIENCE_MS)))
    return found


def outcome_of(action):
    """What an action gives, or the name of the error that it ends with."""
    try:
        action()
    except pulsar.PulsarException as error:
        return type(error).__name__
    return "done"


def eventually(condition, patience_s=PATIENCE_MS / 1000):
    """Waits until a condition gives something."""
    end = time.monotonic() + patience_s
    while True:
        found = condition()
        if found or time.monotonic() > end:
            return found
        time.sleep(0.1)
