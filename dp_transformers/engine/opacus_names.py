"""Names of Opacus, and what takes their place here, for loops that come from there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

MADE_PRIVATE = (
    "write model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, ...)"
)
_ARGUMENTS = {
    "alphas": "leave it out: the accountant 'rdp' has orders of its own",
    "batch_size": "the DataLoader's batch size is taken",
    "grad_sample_mode": "take clipping_mode: 'book_keeping' (the default) or 'per_sample' for 'hooks', 'functorch' "
    "and 'ew', 'ghost' with criterion= for 'ghost'; FSDP2 needs no mode of its own",
    "max_grad_norm": f"{MADE_PRIVATE}, which takes it",
    "max_grad_norms": "take mechanism=Mechanism(clipping=PerLayerClipping(...))",
    "module": MADE_PRIVATE,
    "noise_generator": "leave it out: noise comes from a secret. PrivacyEngine(dp_seed=...) repeats it in tests",
    "noise_multiplier": f"{MADE_PRIVATE}, which takes it",
    "noise_seed": "leave it out: noise comes from a secret. PrivacyEngine(dp_seed=...) repeats it in tests",
    "normalize_clipping": "take mechanism=Mechanism(clipping=NormalisedClipping(...))",
    "rand_on_empty": "leave it out: an empty draw comes as one row of weight 0",
    "sample_rate": "the DataLoader's batch size over the number of examples is taken",
    "sample_size": "the length of the data set is taken",
    "secure_mode": "take PrivacyEngine(secure_rng=True)",
    "wrap_model": "leave it out: the model is never wrapped, but hooked. engine.detach() takes the hooks off",
}


class OfOpacus:
    """Stands on a class for a method of Opacus that it does not have, and says what does it here."""

    def __init__(self, way_out: str):
        self._way_out = way_out

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{self._name} is of Opacus, and not here: {self._way_out}. (docs/from-opacus.md)")


def refuse_unknown(given: Iterable[str], where: str, known: Iterable[str]) -> None:
    """Raise TypeError for arguments that ``where`` does not have, and say what those of Opacus are called here."""
    for name in given:
        way_out = _ARGUMENTS.get(name) or f"it has {', '.join(known)}"
        raise TypeError(f"{where} has no argument '{name}': {way_out}. (docs/from-opacus.md)")
