"""The words of every error: `<op>: <argument> must <requirement>, but got <observation>[; <remedy>]`."""


class DeviceMismatchError(RuntimeError):
    """The tensors of one call live on different devices."""


def sentence(op: str, argument: str, requirement: str, observation: object, remedy: str = "") -> str:
    text = f"{op}: {argument} must {requirement}, but got {observation}"
    return f"{text}; {remedy}" if remedy else text


def kind(value: object) -> str:
    """The type of a value as a message names it: `list`, `numpy.ndarray`, `torch.Tensor`."""
    cls = value if isinstance(value, type) else type(value)
    module = cls.__module__.partition(".")[0]
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
