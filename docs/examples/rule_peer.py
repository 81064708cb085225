"""A peer without a model: it solves the tiny models' arithmetic by rule, and shares each answer, signed.

python docs/examples/rule_peer.py STATE_FOLDER BOOTSTRAP_ADDRESS…
"""

import os
import re
import sys
import time

import swarmd

os.environ |= {"SWARMD_TASKS_SPECIALTIES": "basic_arithmetic", "SWARMD_SHARING_SHARE": "right"}
with swarmd.join(bootstrap=sys.argv[2:], folder=sys.argv[1], external=0, author="a rule") as swarm:
    while swarm.joined:
        (task,) = swarm.tasks.draw()
        if found := re.search(r"(\d+) ([+-]) (\d+)", task.question):
            a, sign, b = found.groups()
            swarm.share(task, [f"<answer>{int(a) + int(sign + b)}</answer>"])
        time.sleep(1)
