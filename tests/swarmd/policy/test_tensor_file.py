import pytest
import torch
from safetensors.torch import save

from swarmd.policy.training.policy_files import tensor_file

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


@pytest.mark.parametrize("tensors", [TENSORS, {}])
def test_the_file_is_the_one_safetensors_writes(tensors: dict[str, torch.Tensor]) -> None:
    assert bytes(tensor_file(tensors)) == save(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    )


def test_a_tensor_file_is_a_copy() -> None:
    tensor = torch.zeros(4)
    data = tensor_file({"x": tensor})
    before = bytes(data)
    tensor.fill_(1.0)
    assert bytes(data) == before
