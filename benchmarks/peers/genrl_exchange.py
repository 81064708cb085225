"""GenRL's exchange of rollouts, unchanged, from its published package in a separate environment.

The exchange is `HivemindBackend.all_gather_object`: every node waits for the sets of all HIVEMIND_WORLD_SIZE
nodes, as at a barrier. Options and output lines are the same as in `benchmarks.network.exchange_node`. The
node listens on loopback only.

This file adds two fixes, without which GenRL does not run. First, hivemind 1.1.12 does not export a name that
GenRL imports. Second, uvloop makes the pipe to hivemind's DHT process non-blocking; the pipe then loses
values of 32 KB and hangs (hivemind issues 77, 102, 227). Here the pipe is made blocking again.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for option in ("--folder", "--digest", "--listen", "--bootstrap", "--engine", "--nodes"):
    parser.add_argument(option)
arguments = parser.parse_args()
os.environ["HIVEMIND_WORLD_SIZE"] = arguments.nodes

import hivemind  # noqa: E402
import hivemind.dht.dht as dht_module  # noqa: E402
import psutil  # noqa: E402

if not hasattr(hivemind, "get_dht_time"):
    from hivemind.utils import get_dht_time

    hivemind.get_dht_time = get_dht_time

import genrl.communication.hivemind.hivemind_backend as backend  # noqa: E402
from genrl.communication.communication import Payload  # noqa: E402
from genrl.state.game_tree import WorldState  # noqa: E402

run_of_the_dht = dht_module.DHT.run


def run_with_a_pipe_that_blocks(self):
    os.set_blocking(self._inner_pipe.fileno(), True)
    receive = self._inner_pipe.recv

    def patient():
        os.set_blocking(self._inner_pipe.fileno(), True)
        return receive()

    self._inner_pipe.recv = patient
    return run_of_the_dht(self)


dht_module.DHT.run = run_with_a_pipe_that_blocks
make = backend.DHT
backend.DHT = lambda **options: make(**{**options, "host_maddrs": [arguments.listen]})

TEXT = "".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md")))
COMPLETIONS = 8


def say(**message):
    sys.stdout.write(json.dumps(message) + "\n")  # a single write, because two threads print
    sys.stdout.flush()


def payloads(rng, number, rollouts, size):
    """Return the same text as swarmd's nodes share, as GenRL's payloads."""
    length = size // COMPLETIONS - 8
    found = {}
    for n in range(rollouts):
        starts = [rng.randrange(len(TEXT) - length) for _ in range(COMPLETIONS)]
        state = WorldState(
            {"question": "q" * 60, "answer": "42", "metadata": {"source_dataset": "basic_arithmetic"}},
            None,
            None,
        )
        found[f"{number:016x}{n:016x}"] = [
            Payload(world_state=state, actions=[TEXT[at : at + length] for at in starts])
        ]
    return found


def tell():
    me = psutil.Process()
    while True:
        family = [me, *me.children(recursive=True)]
        cpu = 0.0
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.Error:  # the process has ended
                continue
            cpu += times.user + times.system
        say(cpu=cpu, pids=[process.pid for process in family])
        time.sleep(0.5)


def main():
    backend.HivemindRendezvouz.init(is_master=arguments.bootstrap is None)
    options = {"initial_peers": [arguments.bootstrap]} if arguments.bootstrap else {}
    communication = backend.HivemindBackend(timeout=600, beam_size=50, **options)
    addresses = [str(address) for address in communication.dht.get_visible_maddrs()]
    say(up=addresses, id=str(communication.dht.peer_id))
    threading.Thread(target=tell, daemon=True).start()
    # GenRL does not show its connections, so report all nodes; a missing connection would show in the
    # warm-up.
    say(peers=list(map(str, range(int(arguments.nodes) - 1))))
    rng = random.Random(str(communication.dht.peer_id))
    for line in sys.stdin:
        order = json.loads(line)
        shared = payloads(rng, order["round"], order["rollouts"], order["bytes"])
        time.sleep(max(0.0, order["at"] - time.time()))
        gathered = communication.all_gather_object(shared)
        after = time.time() - order["at"]
        others = len(gathered) - 1
        if others == int(arguments.nodes) - 1:
            say(held=order["round"], after=after, bytes=others * order["rollouts"] * order["bytes"])
    for child in psutil.Process().children(recursive=True):
        child.kill()  # hivemind's own processes do not end by themselves
    os._exit(0)


if __name__ == "__main__":
    main()
