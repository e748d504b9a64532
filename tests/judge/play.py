"""Plays scenarios against one broker and writes what came out, as JSON. Started by tests/judge/run."""

import argparse
import json
import pathlib
import signal
import sys
import time
import traceback

import brokers
import scenarios  # noqa: F401 (registers them)
from world import SCENARIOS, World


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("broker", choices=["embedded", "apache"])
    parser.add_argument("--gradwire", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("wanted", nargs="*")
    args = parser.parse_args()
    wanted = [name for name in SCENARIOS if not args.wanted or any(part in name for part in args.wanted)]
    if not wanted:
        sys.exit(f"no scenario is called like {args.wanted}; there are {', '.join(SCENARIOS)}")
    # As an exception, so that brokers and what they keep are cleared away.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    broker = brokers.Embedded(args.gradwire) if args.broker == "embedded" else brokers.Apache()
    try:
        outcomes = {name: play(broker, name, args.broker) for name in wanted}
    finally:
        broker.close()
    args.out.write_text(json.dumps(outcomes, indent=1))
    return 0


def play(broker, name: str, kind: str) -> dict:
    started = time.monotonic()
    world = None
    try:
        world = World(broker, name)
        return {"outcome": SCENARIOS[name](world)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        line = next((frame for frame in reversed(where) if "scenarios" in frame.filename), where[-1])
        return {"broken": f"{type(error).__name__}: {error} (line {line.lineno}: {line.line})"}
    finally:
        if world is not None:
            world.close()
        print(f"played {name} against {kind}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
