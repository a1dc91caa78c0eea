"""Notes for users on a model's number formats on a device."""

from __future__ import annotations

from hwmodels.device import Device
from hwmodels.model.model_spec import ModelSpec
from hwmodels.model.weights import Role, weight_format


def precision_notes(model: ModelSpec, device: Device) -> list[str]:
    """Returns notes on formats that the device does not compute in and on unusable sparsity; else none."""
    formats = {("weights", model.weight_format_of(Role.dense))}
    if model.has_experts:
        formats.add(("moe_weights", model.weight_format_of(Role.routed)))
    of_role = {name for _, name in formats}
    others = sorted({name for block in model.blocks for _, name in block.formats} - of_role)
    notes = []
    for setting, name in (*sorted(formats, reverse=True), *(("formats", name) for name in others)):
        stored = weight_format(name)
        if stored.falls_back_on(device):
            computed = stored.compute_dtype(device, model.dtype)
            notes.append(
                f"{setting}={stored.name}: {device.name} does not compute in {stored.compute}; weights are "
                f"stored in {stored.name} and multiplied in {computed}."
            )
    if model.sparsity is not None and not device.sparse_tensor_cores:
        notes.append(
            f"sparsity={model.sparsity}: {device.name} has no sparse tensor cores; it saves bytes, not FLOPs."
        )
    return notes
