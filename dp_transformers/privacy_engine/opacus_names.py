"""What arguments of Opacus are called here, for loops that come from there."""

from __future__ import annotations

from collections.abc import Iterable

_ARGUMENTS = {
    "alphas": "leave it out: the accountant 'rdp' has orders of its own",
    "batch_size": "the DataLoader's batch size is taken",
    "grad_sample_mode": "take clipping_mode: 'book_keeping' (the default) or 'per_sample' for 'hooks', 'functorch' "
    "and 'ew', 'ghost' with criterion= for 'ghost'; FSDP2 needs no mode of its own",
    "max_grad_norms": "take mechanism=Mechanism(clipping=PerLayerClipping(...))",
    "noise_generator": "leave it out: noise comes from a secret. PrivacyEngine(dp_seed=...) repeats it in tests",
    "noise_seed": "leave it out: noise comes from a secret. PrivacyEngine(dp_seed=...) repeats it in tests",
    "normalize_clipping": "take mechanism=Mechanism(clipping=NormalisedClipping(...))",
    "rand_on_empty": "leave it out: an empty draw comes as one row of weight 0",
    "sample_rate": "the DataLoader's batch size over the number of examples is taken",
    "sample_size": "the length of the data set is taken",
    "secure_mode": "take PrivacyEngine(secure_rng=True)",
    "wrap_model": "leave it out: the model is never wrapped, but hooked. engine.detach() takes the hooks off",
}


def refuse_unknown(given: Iterable[str], where: str, known: Iterable[str]) -> None:
    """Raise TypeError for arguments that ``where`` does not have, and say what those of Opacus are called here."""
    for name in given:
        way_out = _ARGUMENTS.get(name) or f"it has {', '.join(known)}"
        raise TypeError(f"{where} has no argument '{name}': {way_out}. (docs/from-opacus.md)")
