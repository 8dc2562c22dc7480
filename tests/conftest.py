"""The device that a test runs on. Whether CUDA tests run is decided here and nowhere else."""

import os
from typing import Optional

import pytest
import torch
from hypothesis import HealthCheck, settings

import fastops

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def why_no_cuda() -> Optional[str]:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    info = fastops.build_info()
    if not info["cuda"]:
        return f"there is a CUDA device, but this build of fastops left CUDA out: {info['cuda_reason']}"
    return None


# For the session, so that hypothesis may use it and all tests of a device run together.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return available(request.param)


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=pytest.mark.cuda)])
def cuda(request):
    return available(request.param)


@pytest.fixture
def make(device):
    """Tensors on the device of the test."""

    def tensor(values, dtype=None, **options):
        return torch.tensor(values, dtype=dtype, device=device, **options)

    return tensor


def available(device: str) -> str:
    reason = why_no_cuda() if device == "cuda" else None
    if reason and os.environ.get("FASTOPS_REQUIRE_CUDA") == "1":
        pytest.fail(f"FASTOPS_REQUIRE_CUDA=1, but {reason}")
    if reason:
        pytest.skip(reason)
    return device


@pytest.fixture(autouse=True)
def same_state_after():
    """Tests leave the process as they found it, and torch's own random numbers (gradcheck uses them) are the same in every run."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.random.set_rng_state(state)
