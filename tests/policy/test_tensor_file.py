import torch
from safetensors.torch import load, save

from swarmd.policy.training.safetensors_bytes import tensor_file

TENSORS = {
    "weight": torch.arange(15, dtype=torch.float32).view(3, 5),
    "step": torch.tensor(3.0),
    "é": torch.arange(7, dtype=torch.uint8),
    "transposed": torch.arange(16, dtype=torch.float64).view(4, 4).t(),
    "half": torch.tensor([1.5, -2.0, 0.25]).to(torch.bfloat16),
    "nothing": torch.empty(0, 3),
    "long": torch.arange(3),
    "trained": torch.nn.Parameter(torch.ones(2, 2)),
}


def test_the_file_is_the_one_safetensors_writes() -> None:
    data = bytes(tensor_file(TENSORS))
    assert data == save({name: tensor.detach().contiguous() for name, tensor in TENSORS.items()})
    back = load(data)
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_it_is_a_copy() -> None:
    tensor = torch.zeros(4)
    data = tensor_file({"x": tensor})
    before = bytes(data)
    tensor.fill_(1.0)
    assert bytes(data) == before


def test_no_tensors_are_a_file_too() -> None:
    assert load(bytes(tensor_file({}))) == {}
