"""Everything about a module that a transform must leave alone, as plain values that can be compared."""

from typing import Any

from torch import Tensor, nn

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Per module its identity, class, hooks, flags and simple attributes; per tensor its identity and values."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = {kind: list(getattr(module, kind)) for kind in HOOKS}
        plain = {
            key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)
        }
        found[f"module {name}"] = (id(module), type(module), hooks, plain, sorted(vars(module)))
        found[f"children {name}"] = [(key, id(child)) for key, child in module.named_children()]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        gradient = None if parameter.grad is None else _values(parameter.grad)
        found[f"parameter {name}"] = (id(parameter), parameter.requires_grad, gradient, _values(parameter))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}"] = (id(buffer), _values(buffer))
    return found


def _values(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, version and exact values."""
    return tuple(tensor.shape), tensor.dtype, tensor._version, tensor.detach().tolist()
