"""Devices and dtypes: what was asked for, checked, and what suits this machine when nothing was."""

from __future__ import annotations

import torch

from rag_embfilter.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALL_GPUS = "cuda:all"
# Below this hidden size a processor spends its time between the products, and bfloat16 gains nothing.
WIDE = 256


def pick_device(device: str | None) -> torch.device:
    """The device asked for, checked; CUDA when there is one and nothing was asked."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); "
            "expected cpu, cuda or cuda:N with a GPU present. Leave it out to pick one."
        ) from error
    return chosen


def all_gpus(device: str | None) -> list[str]:
    """Names of this machine's GPUs when `cuda:all` asks for them, else nothing. Raises `ConfigError`."""
    if device != ALL_GPUS:
        return []
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: no GPU here. Leave the device out to use what there is.")
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device, hidden_size: int = 0) -> torch.dtype:
    """The dtype asked for, checked.

    When nothing was asked: bfloat16 on CUDA, and on a processor that multiplies it natively when the model
    is wide enough to gain by it; else float32.
    """
    if dtype is None:
        fast = device.type == "cuda" or (device.type == "cpu" and hidden_size >= WIDE and native_bfloat16())
        return torch.bfloat16 if fast else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}.")
    return chosen


def native_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16 (AVX-512 BF16 or AMX)."""
    # Without them PyTorch emulates, slower than float32. It tells by functions whose names may change.
    asked = [
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return any(supported() for supported in asked if supported is not None)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
