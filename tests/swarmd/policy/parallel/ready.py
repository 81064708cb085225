"""A worker that reports ready and does nothing: `python -m tests.swarmd.policy.parallel.ready FD`."""

from swarmd.policy.parallel.messages import Begin, WorkerReady
from swarmd.policy.parallel.worker import WorkerLink, run


def wait(_: Begin, inside: WorkerLink) -> None:
    inside.send(WorkerReady())
    while True:
        inside.messages.get()


if __name__ == "__main__":
    run(wait)
