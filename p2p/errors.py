"""What an operator can act on. The command line prints the message, without a traceback, and exits with the class's code."""


class OperatorError(Exception):
    """Something went wrong that you can put right."""

    exit_code = 2

    def __str__(self) -> str:
        return super().__str__() or (self.__doc__ or "").strip()


class NoKeyFile(OperatorError):
    """There is no key file. `swarmd join` makes one; to keep an old identity, copy its backup there first."""


class KeyFileTooOpen(OperatorError):
    """Others on this machine can read the key file. Run `chmod 600` on it; if they may have read it, start with a new key."""


class KeyFileCorrupt(OperatorError):
    """The key file is damaged. Restore it from a backup, or move it away to start with a new key and a new peer id."""


class KeyFileUnusable(OperatorError):
    """The key file cannot be read or written. Check its folder's permissions and the free space."""


class StateUnwritable(OperatorError):
    """A file of this node's state cannot be written. Check the folder's permissions and the free space."""


class BadAddress(OperatorError):
    """An address is not one. One looks like /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…"""


class PortInUse(OperatorError):
    """Another program is using the listen port. Change swarm.listen, or stop the other program; port 0 takes any free one."""


class CannotListen(OperatorError):
    """This machine has no such listen address. Change swarm.listen; /ip4/0.0.0.0/tcp/0 always works."""


class NoSuchEngine(OperatorError):
    """No engine has this name."""


class EngineMissing(OperatorError):
    """What the p2p engine needs is not on this machine. Set swarm.engine = "libp2p", which works everywhere."""
