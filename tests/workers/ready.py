"""A worker that says it is ready and does nothing: `python -m tests.workers.ready FD`."""

from swarmd.workers.messages import Begin, Ready
from swarmd.workers.worker_main import Inside, run


def wait(_: Begin, inside: Inside) -> None:
    inside.send(Ready())
    while True:
        inside.messages.get()


if __name__ == "__main__":
    run(wait)
