"""Names of topics and subscriptions: which of them are one, and which are refused."""

from world import outcome_of, scenario, texts


@scenario
def short_and_full_names_are_one_topic(world):
    name = world.topic()
    consumer = world.consumer(f"persistent://public/default/{name}")
    world.producer(name).send(b"short")
    world.producer(f"public/default/{name}").send(b"middle")
    return {"found": texts(consumer, 2)}


@scenario
def odd_names(world):
    name = world.topic()
    wanted = {
        "slash": f"persistent://public/default/{name}/more",
        "blank": f"persistent://public/default/{name} x",
        "letters": f"persistent://public/default/{name}-∇",
        "no scheme of pulsar": f"http://public/default/{name}",
        "empty": "persistent://public/default/",
        "long": f"persistent://public/default/{name}-" + "x" * 200,
    }
    return {what: outcome_of(lambda: world.producer(topic)) for what, topic in wanted.items()} | {
        "subscription": outcome_of(lambda: world.consumer(subscription="a/b c∇")),
    }


@scenario
def partitions_of_a_topic(world):
    topic = world.topic()
    world.producer(topic).send(b"x")
    return {"partitions": [name.endswith(topic) for name in world.client.get_topic_partitions(topic)]}
