"""All scenarios. Importing this registers them, in the order in which they are played: restarts come last."""

from . import messages, names, producers  # noqa: F401
from . import acks, reading, subscriptions, key_shared  # noqa: F401
from . import durable  # noqa: F401
