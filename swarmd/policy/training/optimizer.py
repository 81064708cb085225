"""AdamW with float32 master copies or stochastic rounding for 16-bit weights, and its saved state.

Weights in float32 are stepped as they are. One in bfloat16 has 8 significant bits: a step below a 512th of it
is rounded away, and at the learning rates of post-training nearly all are. So trained weights in 16 bits are
stepped in float32:

    master      A float32 copy takes the steps, and the weight is the copy, rounded (Micikevicius et al.,
                arXiv 1710.03740, section 3.1). 4 bytes a weight more.
    stochastic  There is no copy: the stepped weight is rounded up or down at random, with chances that make
                its mean the exact value (Gupta et al., arXiv 1502.02551, section 2.1; of bfloat16 weights:
                Zamirai et al., arXiv 2010.06192). Steps add up on average.

Adam as in SAPO section 4.2: default betas, no weight decay. `adamw8bit` keeps its two moments in 8 bits, in
blocks (Dettmers et al., arXiv 2110.02861), by bitsandbytes; tensors of fewer than 4,096 numbers keep 32.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from swarmd.errors import SwarmdError, command_for

# Numbers of a 16-bit weight that are in float32 at once while they are stepped: 64 MiB.
PIECE_NUMBERS: Final = 2**24


class NoOptimizer(SwarmdError):
    """The optimizer that was asked for cannot be had. Set train.optimizer = 'adamw', or install it."""


def require(kind: str, device: torch.device) -> None:
    """Raise NoOptimizer where an optimizer does not run, or its library is missing; import nothing."""
    if kind == "adamw8bit" and device.type == "mps":
        raise NoOptimizer(
            "train.optimizer 'adamw8bit' does not run on Apple's MPS. Set train.optimizer = 'adamw'."
        )
    if kind == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise NoOptimizer(
            "train.optimizer = 'adamw8bit' needs the library bitsandbytes, which is not installed here. "
            f"Run `{command_for('bitsandbytes')}`, or set train.optimizer = 'adamw'."
        )


class Optimizer:
    """Steps `weights` along their gradients.

    kind: "adamw" or "adamw8bit"; precision, of weights in 16 bits: "master" or "stochastic".
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        kind: str = "adamw",
        precision: str = "master",
        seed: int = 0,
    ) -> None:
        """Prepare to step the weights. seed: of what is rounded at random. Raises NoOptimizer."""
        self.kind, self.precision = kind, precision
        self._weights = weights
        self._plain = {name: weight for name, weight in weights.items() if weight.dtype == torch.float32}
        self._pieces = {
            name: list(_pieces(name, weight)) for name, weight in weights.items() if name not in self._plain
        }
        self._stepped: dict[str, nn.Parameter] = {
            **self._plain,
            **{piece.name: piece.stepped for piece in self._all_pieces()},
        }
        self._adam = _adam(kind, list(self._stepped.values()))
        device = next(iter(weights.values())).device
        self._random = torch.Generator(device=device).manual_seed(seed)
        if precision == "master":
            for piece in self._all_pieces():
                piece.stepped.data = piece.part.float()

    @property
    def in_pieces(self) -> bool:
        """Whether there are weights so large, in 16 bits, that they are stepped piece by piece."""
        return any(len(pieces) > 1 for pieces in self._pieces.values())

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step at this learning rate.

        Weights without a gradient stay; gradients are gone afterwards.
        """
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for name, pieces in self._pieces.items():
            gradient = self._weights[name].grad
            for piece in pieces if gradient is not None else ():
                self._step_piece(piece, gradient)  # type: ignore[arg-type]  # mypy does not see the condition
            self._weights[name].grad = None

    def _step_piece(self, piece: "_Piece", gradient: Tensor) -> None:
        """Step one piece: it alone has a gradient, so Adam skips all others."""
        if self.precision == "stochastic":
            piece.stepped.data = piece.part.float()
        piece.stepped.grad = gradient.reshape(-1)[piece.place].view(piece.shape).float()
        self._adam.step()
        piece.stepped.grad = None
        if self.precision == "stochastic":
            piece.part.copy_(rounded_at_random(piece.stepped.data, piece.part.dtype, self._random))
            piece.stepped.data = piece.stepped.data.new_empty(0)
        else:
            piece.part.copy_(piece.stepped.data)

    def clear(self) -> None:
        """Forget the gradients."""
        for weight in self._weights.values():
            weight.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, as "<field>/<weight>".

        They are moments and step counts, master copies, and the random state of stochastic rounding.
        """
        found: dict[str, Tensor] = {}
        for name, stepped in self._stepped.items():
            for field, value in self._adam.state.get(stepped, {}).items():
                found[f"{field}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        if self.precision == "master":
            found |= {f"{MASTER}/{piece.name}": piece.stepped.detach() for piece in self._all_pieces()}
        if self.precision == "stochastic":
            found[ROUNDING] = self._random.get_state()
        return found

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether `tensors` are a whole state of this optimizer.

        That is all of Adam's state for each weight or, before the first step, for none.
        """
        of: dict[str, dict[str, Tensor]] = {name: {} for name in self._stepped}
        for key, value in tensors.items():
            field, _, name = key.partition("/")
            if key == ROUNDING or field == MASTER:
                continue
            if name not in of:
                return False
            of[name][field] = value
        shapes = {piece.name: piece.shape for piece in self._all_pieces()}
        if any(
            tensors.get(f"{MASTER}/{name}", torch.empty(shape, device="meta")).shape != shape
            for name, shape in shapes.items()
        ):
            return False
        for name, state in of.items():
            shape = shapes.get(name, self._stepped[name].shape)
            fields = set(state)
            if fields and not (
                fields in _FIELDS[self.kind] and all(state[f].shape == shape for f in _WHOLE & fields)
            ):
                return False
        return len({bool(state) for state in of.values()}) == 1

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], same_device: bool) -> None:
        """Put back the trained weights, and what `tensors` gave of them; see `fits`.

        They may have been of another precision then. same_device: the device is that of the one that gave
        them.
        """
        for name, weight in self._plain.items():
            weight.copy_(_joined(name, tensors, weights[name]))
        for name, pieces in self._pieces.items():
            self._weights[name].copy_(weights[name])
            for piece in pieces if self.precision == "master" else ():
                exact = tensors.get(
                    f"{MASTER}/{piece.name}", weights[name].reshape(-1)[piece.place].view(piece.shape)
                )
                piece.stepped.data = exact.to(piece.part.device, torch.float32, copy=True)
        self._adam.state.clear()
        for key, value in tensors.items():
            field, _, name = key.partition("/")
            if key == ROUNDING:
                if same_device:
                    self._random.set_state(value.cpu())
            elif field != MASTER:
                stepped = self._stepped[name]
                # bitsandbytes counts in a number of its own.
                kept = (
                    int(value)
                    if field == "step" and self.kind == "adamw8bit"
                    else value.to(stepped.device, copy=True)
                )
                self._adam.state.setdefault(stepped, {})[field] = kept

    def _all_pieces(self) -> Iterator["_Piece"]:
        for pieces in self._pieces.values():
            yield from pieces


MASTER: Final = "master"
ROUNDING: Final = "rounding"
_FIELDS: Final = {
    "adamw": ({"step", "exp_avg", "exp_avg_sq"},),
    "adamw8bit": (
        {"step", "state1", "state2"},
        {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"},
    ),
}
_WHOLE: Final = {"exp_avg", "exp_avg_sq", "state1", "state2"}  # Adam's states that have the weight's shape


class _Piece:
    """A part of a weight in 16 bits, and what Adam steps in its stead.

    A small weight is one piece, of its own shape and name.
    """

    def __init__(self, name: str, weight: nn.Parameter, place: slice, shape: torch.Size) -> None:
        self.name, self.place, self.shape = name, place, shape
        self._weight = weight
        # In float32; empty between steps where there is no master copy.
        self.stepped = nn.Parameter(torch.empty(0, device=weight.device))

    @property
    def part(self) -> Tensor:
        """A view of the weight as it is."""
        return self._weight.data.view(-1)[self.place].view(self.shape)


def _pieces(name: str, weight: nn.Parameter) -> Iterator[_Piece]:
    count = weight.numel()
    if count <= PIECE_NUMBERS:
        yield _Piece(name, weight, slice(0, count), weight.shape)
        return
    for i, begin in enumerate(range(0, count, PIECE_NUMBERS)):
        end = min(begin + PIECE_NUMBERS, count)
        yield _Piece(f"{name}#{i}", weight, slice(begin, end), torch.Size([end - begin]))


def _joined(name: str, tensors: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """Join a weight's float32 copy from its pieces; return `weight` where there is none."""
    keys = [f"{MASTER}/{name}"] + [f"{MASTER}/{name}#{i}" for i in range(-(-weight.numel() // PIECE_NUMBERS))]
    parts = [tensors[key].reshape(-1) for key in keys if key in tensors]
    return torch.cat(parts).view(weight.shape) if sum(map(len, parts)) == weight.numel() else weight


def _adam(kind: str, weights: list[nn.Parameter]) -> Any:
    require(kind, weights[0].device)
    if kind == "adamw":
        return torch.optim.AdamW(weights, weight_decay=0.0, fused=True)
    try:
        # Imported here: it is heavy, and not everybody has it.
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:
        # Its binary does not match this machine's driver.
        raise NoOptimizer(
            f"bitsandbytes, which train.optimizer = 'adamw8bit' needs, does not work here ({error}). "
            "Install a build of it for this machine, or set train.optimizer = 'adamw'."
        ) from error
    return AdamW8bit(weights, weight_decay=0.0)


def rounded_at_random(exact: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 at random, so that the mean is `exact`.

    The result is one of the two neighbours, the nearer the likelier; what bfloat16 can show stays. The 16
    bits that go are a fraction of the step between neighbours: 16 random bits added to them carry with just
    that chance.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"weights of {dtype} are not rounded at random, bfloat16 ones are")
    bits = exact.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(dtype)
