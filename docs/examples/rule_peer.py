"""A peer without a model: it solves the tiny models' arithmetic by rule, and shares each answer, signed.

python docs/examples/rule_peer.py STATE_FOLDER BOOTSTRAP_ADDRESS…
"""

import os
import re
import sys
from pathlib import Path

from swarmd.config.sources import load
from swarmd.daemon.answering import AnsweringPeer
from swarmd.state.folder import StateFolder

config = load(
    None, os.environ | {"SWARMD_TASKS_SPECIALTIES": "basic_arithmetic"}, {"bootstrap": sys.argv[2:]}
)
with StateFolder.open(Path(sys.argv[1])) as state, AnsweringPeer(config, state.path, "a rule") as peer:
    for task in peer.questions():
        if found := re.search(r"(\d+) ([+-]) (\d+)", task.question):
            a, sign, b = found.groups()
            peer.share(task, [peer.judge(task, str(int(a) + int(sign + b)))])
