"""Checks of models, data sets and optimizers before anything is trained, and repairs of models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.data import IterableDataset

from ..clipping.errors import HOW_TO_UNCOMPILE, is_compiled
from ..clipping.hooks import is_frozen_batch_norm
from ..clipping.owners import unsupported_wrapper_reason
from ..clipping.parallel.fsdp2 import reshard
from ..clipping.precision import TRAINABLE
from ..data.stored_rows import most_frequent_row
from ..mechanism.accounting.accountants import require_small_delta
from ..mechanism.mechanism import PrivacyUnit
from .find_mixing import ExampleMixing, find_example_mixing

logger = logging.getLogger(__name__)

_USE_LORA = "; use LoRA"
_DRAWS_A_MASK = (
    "it draws one mask of weights, or one coin, for all rows of a physical batch, so which rows share it depends on "
    "the other examples; set {0}=0.0"
)
# What peft's adapters do that cannot be private: by their kind, or by an option of their configuration that is set
_REFUSED_ADAPTERS = {
    "ADALORA": "its regulariser is added to the model's own loss, which is not used here, and it prunes by gradients"
    + _USE_LORA,
    "CPT": "it has a loss of its own, and its forward pass writes the weights that are trained; use prompt tuning",
    "LILY": "its router takes the mean over all tokens of a batch, so one example changes what another one gets"
    + _USE_LORA,
    "OSF": "its hooks change gradients before they are private" + _USE_LORA,
    "XLORA": "its forward pass runs the model twice and switches adapters, and what is trained, on the way; use one "
    "LoRA adapter",
    "alora_invocation_tokens": "it gathers the positions behind the invocation of all examples into one tensor, in "
    "which they cannot be told apart" + _USE_LORA,
    "auxiliary_loss_weight": "its auxiliary loss is added to the model's own loss, which is not used here; set {0}=0",
    "monteclora_config": "it takes the next samples from a store in every forward pass, so none can be run again"
    + _USE_LORA,
    "velora_config": "it keeps averages of private activations; set init_type='random' in its VeloraConfig",
    "module_dropout": _DRAWS_A_MASK,
    "rank_dropout": _DRAWS_A_MASK,
    "boft_dropout": _DRAWS_A_MASK,
}

# These modules of other libraries mix the examples of a batch, whether they are trained or not. The key is the name of
# the class, or of a base class.
_MIXES_EXAMPLES = {
    "NllbMoeTop2Router": "an expert takes a limited number of tokens of the whole batch, so one example can push "
    "out another's. Freezing it does not help; use another architecture",
    "Linear8bitLt": "it looks for outliers in the whole batch (llm_int8_threshold), so what one example holds changes "
    "how another one is rounded, and it keeps in its state what it saw. Load the model in four bits "
    "(load_in_4bit=True)",
}

# Settings of transformers' modules by which a pass draws one random number for all rows of a physical batch: what that
# does, what switches it off, and which modules read the setting
_DROPS_LAYERS = "leaves a layer out for all rows of a batch"
_DROPS_POSITIONS = "draws one mask of positions for all rows of a batch"
_REFUSED_SETTINGS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "layerdrop": (_DROPS_LAYERS, "0.0", lambda m: True),
    "config.layerdrop": (_DROPS_LAYERS, "0.0", lambda m: hasattr(m, "layers") and not hasattr(m, "layerdrop")),
    "config.apply_spec_augment": (
        "draws one number for all rows of a batch, by which spans are masked (SpecAugment)",
        "False",
        lambda m: hasattr(m, "_mask_hidden_states") and (m.config.mask_time_prob or m.config.mask_feature_prob),
    ),
    "config.attention_type": (
        "draws the same keys for all rows of a batch",
        "'full'",
        lambda m: m.config.attention_type == "prob",
    ),
    "dropout.p": (_DROPS_POSITIONS, "0.0", lambda m: type(m).__name__ == "XLNetModel"),
    **{f"{name}_dropout.p": (_DROPS_POSITIONS, "0.0", lambda m: True) for name in ("pos", "sin", "cos")},
}


@dataclass(frozen=True)
class Problem:
    """Something about a model that keeps it from being trained privately; ``str()`` says what, where, and the way out.

    Attributes:
        path: The path of the module within the model, the first one if it has several; "" is the model itself.
        message: What is wrong, where, and what to do.
        fix: What :meth:`ModuleValidator.fix` does about it; None where you must repair it.
    """

    path: str
    message: str
    fix: str | None = None
    _module: nn.Module | None = field(default=None, repr=False, compare=False)
    # the function that makes the module which takes the place of _module
    _repair: Callable[[Any], nn.Module] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.message


ModuleFunction = Callable[[Any], Any]
_VALIDATORS: dict[type[nn.Module], list[Callable[[Any], list[str]]]] = {}
_FIXERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {}


def register_module_validator(*module_classes: type[nn.Module]) -> Callable[[ModuleFunction], ModuleFunction]:
    """Let ``ModuleValidator`` and all trainings refuse modules of exactly these classes for what the decorated
    function says: ``f(module)`` returns a list of sentences, each what is wrong and what to do, empty where nothing
    is.

    Example::

        >>> from torch import nn
        >>> from dp_transformers import ModuleValidator, register_module_validator
        >>> class Tabular(nn.Linear):
        ...     pass
        >>> @register_module_validator(Tabular)
        ... def not_too_wide(module):
        ...     return ["it has more than 100 inputs. Select some."] if module.in_features > 100 else []
        >>> str(ModuleValidator.validate(nn.Sequential(Tabular(200, 2)))[0])
        "'0' is a Tabular: it has more than 100 inputs. Select some."
    """

    def register(function: ModuleFunction) -> ModuleFunction:
        for cls in module_classes:
            _VALIDATORS.setdefault(cls, []).append(function)
        return function

    return register


def register_module_fixer(*module_classes: type[nn.Module]) -> Callable[[ModuleFunction], ModuleFunction]:
    """Let ``ModuleValidator.fix`` replace modules of exactly these classes that have a problem by what the decorated
    function returns for them. The last registration wins, also over the repairs of this library.

    Example::

        >>> from torch import nn
        >>> from dp_transformers import ModuleValidator, register_module_fixer
        >>> class Norm(nn.BatchNorm1d):
        ...     pass
        >>> @register_module_fixer(Norm)
        ... def by_layer_norm(module):
        ...     return nn.LayerNorm(module.num_features)
        >>> ModuleValidator.fix(nn.Sequential(nn.Linear(3, 4), Norm(4)))[1]
        LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)
    """

    def register(function: ModuleFunction) -> ModuleFunction:
        for cls in module_classes:
            _FIXERS[cls] = function
        return function

    return register


class ModuleValidator:
    """Finds what keeps a model from being trained privately, and repairs what can be repaired.

    Example::

        >>> from torch import nn
        >>> from dp_transformers import ModuleValidator
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> ModuleValidator.is_valid(model)
        False
        >>> ModuleValidator.fix(model)[1]  # before the optimizer is built, which holds parameters
        GroupNorm(1, 4, eps=1e-05, affine=True, bias=True)
    """

    @staticmethod
    def validate(model: nn.Module, strict: bool = False) -> list[Problem]:
        """Return every problem of the model. There is none if the model can be trained privately, as far as its
        modules tell.

        What a module does with the batch in a ``forward`` of its own is not seen here. :meth:`find_mixing` and the
        self-check before the first step see it.

        Raises:
            ValueError: ``strict`` is set and there are problems, which the message names all.
        """
        _warn_of_starts_from_data(model)
        problems = list(_problems(model))
        if problems and strict:
            lines = [f"the model has {len(problems)} problems:"] if len(problems) > 1 else []
            lines += map(str, problems)
            if any(problem.fix for problem in problems):
                lines.append("ModuleValidator.fix(model) gives a copy with such modules replaced.")
            raise ValueError("\n".join(lines))
        return problems

    @staticmethod
    def is_valid(model: nn.Module) -> bool:
        return not ModuleValidator.validate(model)

    @staticmethod
    def fix(model: nn.Module, *, num_groups: int | None = None) -> nn.Module:
        """Return a copy of the model with every problem repaired that has a ``fix``. Each repair is logged as a
        warning.

        The copy computes something else than the model did, so weights that were trained with a replaced module need
        some (private) training again. Parameters keep their values, dtype, device and ``requires_grad``, and modules
        their training mode. Build the optimizer from the copy's parameters. :meth:`validate` tells beforehand what
        will be done, and afterwards what is left.

        Args:
            num_groups: The number of groups of every GroupNorm that replaces a batch norm, in the place of one that is
                chosen for each. It must divide the channels. For another layer than GroupNorm register a fixer
                (:func:`register_module_fixer`).
        """
        model = copy.deepcopy(model)
        for problem in list(_problems(model)):
            if problem._repair is not None and problem._module is not None:
                options = {"num_groups": num_groups} if problem._repair is _group_norm else {}
                model = _replace(model, problem._module, problem._repair(problem._module, **options))
                logger.warning("%s: %s", f"'{problem.path}'" if problem.path else "the model", problem.fix)
        return model

    @staticmethod
    def find_mixing(model: nn.Module, batch: Any) -> ExampleMixing | None:
        """Return which examples of a batch influence each other's outputs, and in which module; None if none does.

        :func:`~dp_transformers.checks.find_mixing.find_example_mixing` says how it is found. The answer
        tells something of the examples, so give it public ones.
        """
        return find_example_mixing(model, batch)


def validate_model(model: nn.Module) -> None:
    """Raise one ValueError that names everything which keeps ``model`` from being trained privately."""
    ModuleValidator.validate(model, strict=True)


def validate_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError for an optimizer that does not step with exactly the trainable parameters of ``model``, once
    for each loss. Nothing would clip the gradients of others, or add noise to them.

    FSDP2 leaves some parameters whole after an evaluation; the optimizer must hold the shards.
    """
    reshard(model)
    if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):  # accelerate wraps it
        raise ValueError(
            "LBFGS evaluates the loss several times for one step; take a first-order optimizer (SGD, AdamW)."
        )
    names = {p: name for name, p in model.named_parameters()}
    held = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    if foreign := [tuple(p.shape) for p in held if p not in names]:
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's (shapes {foreign[:3]}): they "
            "would be trained without noise. Build it from model.parameters() after the last change of the model; "
            "where it trains two models, hold both in one nn.Module whose forward calls them, and hand that over."
        )
    if missed := [name for p, name in names.items() if p.requires_grad and p not in held]:
        raise ValueError(
            f"the optimizer misses {len(missed)} trainable parameters ({', '.join(missed[:3])}): they would take up "
            "the clipping bound without being trained. Freeze them (requires_grad_(False)) or give them to it."
        )
    if frozen := [names[p] for p in held if not p.requires_grad and p.grad is not None]:
        raise ValueError(
            f"'{frozen[0]}' is frozen, but has a gradient that the optimizer would use: set its grad to None."
        )


def _problems(model: nn.Module) -> Iterator[Problem]:
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    seen: set[int] = set()
    for module, its_paths in paths.items():
        for name, config in getattr(module, "peft_config", {}).items():
            if id(config) not in seen and (why := _why_not_adapter(config)):
                yield Problem(its_paths[0], f"adapter '{name}' is {why}.")
            seen.add(id(config))
        held = " and ".join(f"'{path}'" for path in its_paths)
        where = f"{held if its_paths != [''] else 'the model'} is {_a(module)}"
        for what, fix, repair in _findings(model, module):
            if own := _FIXERS.get(type(module)):
                fix = f"{type(module).__name__} -> what {getattr(own, '__name__', 'a fixer')} makes of it"
            yield Problem(its_paths[0], f"{where}{what}", fix, module, own or repair)
    yield from _setting_problems(model)
    yield from _parameter_problems(model)


def _a(thing: Any) -> str:
    """Return the name of its class, with its article."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


# The rest of the sentence "'path' is a Class...", what fix() does about it, and what makes the module in its place
Finding = tuple[str, str | None, Callable[[Any], nn.Module] | None]


def _findings(model: nn.Module, module: nn.Module) -> Iterator[Finding]:
    """Yield what is wrong with a module by itself."""
    yield from _batch_statistics(model, module)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield from _embedding_options(module)
    names = [cls.__name__ for cls in type(module).__mro__ if not cls.__module__.startswith("peft.")]  # as it wraps one
    what = [f": {why}." for name, why in _MIXES_EXAMPLES.items() if name in names]
    is_hooked = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    if module.training and (is_hooked or isinstance(module, _SpectralNorm)):
        what.append(
            (" with spectral norm" if is_hooked else "")
            + ": it writes its vectors in every forward pass, so that no pass can be run again. Call its eval() after "
            "every model.train(), which keeps them as they are, or leave it out; weight_norm can be trained."
        )
    what += [f" compiled by torch.compile, {HOW_TO_UNCOMPILE}"] * is_compiled(module)
    if (type(module).__module__, type(module).__name__) == ("peft.tuners.lora.layer", "MultiheadAttention"):
        what.append(
            ": in every forward pass it merges its adapter into new weights, which no rule sees. Leave it out of "
            "target_modules (exclude_modules), or train the attention itself (modules_to_save)."
        )
    what += [f": {why}." for why in [unsupported_wrapper_reason(module)] if why]
    what += [f": {each}" for validator in _VALIDATORS.get(type(module), ()) for each in validator(module)]
    yield from ((each, None, None) for each in what)


def _batch_statistics(model: nn.Module, module: nn.Module) -> Iterator[Finding]:
    name = type(module).__name__
    if isinstance(module, _BatchNorm):
        is_fixed = model.training and not module.training and module.running_mean is not None
        if is_fixed or is_frozen_batch_norm(module):
            return  # a fixed map of each example, as long as it is not switched back, which the self-check sees
        groups = _num_groups(module)
        yield (
            ": it normalises with statistics of the whole batch, so no example has a gradient of its own. Replace it "
            "by GroupNorm or LayerNorm, or, to keep the statistics of pretraining, freeze its parameters, or call its "
            "eval() after every model.train().",
            f"{name} -> GroupNorm({groups}, {module.num_features})" if groups else None,
            _group_norm if groups else None,
        )
    elif getattr(module, "track_running_stats", False) is True or (
        # a frozen batch norm has no momentum and keeps its statistics
        getattr(module, "running_var", None) is not None and hasattr(module, "momentum")
    ):
        known = isinstance(module, _InstanceNorm)
        yield (
            " with running statistics, which would keep private data. Build it with track_running_stats=False.",
            f"{name}: track_running_stats=True -> False" if known else None,
            _forget_statistics if known else None,
        )


def _embedding_options(module: nn.Embedding | nn.EmbeddingBag) -> Iterator[Finding]:
    for option, why, off in (
        ("max_norm", "it rewrites the rows of the tokens it sees, trainable or not, without noise", None),
        ("scale_grad_by_freq", "it scales one example's gradient by what the others contain", False),
        ("sparse", "the noised gradient is dense", False),
    ):
        value = getattr(module, option)
        if value not in (None, False) and (module.weight.requires_grad or option == "max_norm"):
            fix = f"{type(module).__name__}: {option}={value} -> {off}"
            yield f" with {option}: {why}. Build it without {option}.", fix, partial(_with_option, option, off)


def _setting_problems(model: nn.Module) -> Iterator[Problem]:
    in_use = [(path, m) for path, m in model.named_modules() if m.training or not model.training]
    for name, (what, off, reads) in _REFUSED_SETTINGS.items():
        if found := [(path, m, value) for path, m in in_use if (value := _setting(m, name)) and reads(m)]:
            path, module, value = found[0]
            where = f"'{path}'{_others(found)}" if path else "the model"
            yield Problem(
                path,
                f"{where} is {_a(module)} with {name}={value!r}, which {what}: which rows share it would depend on "
                f"the other examples. Set {name} = {off} there before training.",
            )


def _setting(module: nn.Module, name: str) -> Any:
    """Return an attribute of the module's own, or one of that; None where there is none."""
    first, _, rest = name.partition(".")
    value = (module._modules if first in module._modules else vars(module)).get(first)
    return getattr(value, rest, None) if rest else value


def _parameter_problems(model: nn.Module) -> Iterator[Problem]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        yield Problem(
            "", "the model has no trainable parameter: set requires_grad on what shall be trained, or add adapters."
        )
    for what, is_so in (
        (
            "without a shape yet: run the model once on public data of the right shape",
            lambda p: isinstance(p, UninitializedParameter),
        ),
        (
            "neither in float32 nor in bfloat16: load the model with dtype=torch.float32, and use bf16 autocast",
            lambda p: p.dtype not in TRAINABLE,
        ),
        (
            "with a gradient hook, which could use gradients that are not private yet: remove() it",
            lambda p: p._backward_hooks or p._post_accumulate_grad_hooks,
        ),
    ):
        if names := [name for name, p in trainable.items() if is_so(p)]:
            where = f"'{names[0]}'{_others(names)} is a trainable parameter ({trainable[names[0]].dtype})"
            yield Problem(names[0].rpartition(".")[0], f"{where} {what}.")


def _others(found: Sequence[Any]) -> str:
    return f" (and {len(found) - 1} others)" if found[1:] else ""


def _why_not_adapter(config: Any) -> str | None:
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[-1]
    for name, why in _REFUSED_ADAPTERS.items():
        value = getattr(config, name, None)
        if (value or name == kind) and getattr(value, "init_type", None) != "random":
            return f"{kind}, which cannot be trained privately: {why.format(name)}"
    return None


def _warn_of_starts_from_data(model: nn.Module) -> None:
    for name, config in getattr(model, "peft_config", {}).items():
        if (start := getattr(config, "init_lora_weights", None)) in ("eva", "corda", "lora_ga"):
            logger.warning(
                "adapter '%s' starts from init_lora_weights=%r, which is computed from data: on private examples that "
                "leaks them, and epsilon does not count it. Compute it on public data, or use another start.",
                name, start,
            )  # fmt: skip


# ---- repairs ----


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put ``new`` wherever ``model`` holds ``old``, and return the model, which may be ``new`` itself."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return new if model is old else model


def _num_groups(batch_norm: _BatchNorm) -> int | None:
    """Return the number of groups of the GroupNorm that replaces a batch norm; None where no GroupNorm can.

    It is the largest divisor of the channels, up to 32, that leaves at least 4 channels to a group, and at least 16
    where there may be no positions beside the channels, since normalising a few numbers leaves little more than their
    signs. (32 groups and 16 channels to a group were the best in Wu and He 2018, arXiv 1803.08494, table 3.)
    """
    # the forward of a subclass may do more than normalise
    plain = type(batch_norm).forward in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)
    hooked = batch_norm._forward_hooks or batch_norm._forward_pre_hooks or hasattr(batch_norm, "parametrizations")
    has_positions, channels = isinstance(batch_norm, (nn.BatchNorm2d, nn.BatchNorm3d)), batch_norm.num_features
    if not plain or hooked or channels < (1 if has_positions else 2):
        return None
    at_least = 4 if has_positions else 16
    return next(
        (groups for groups in range(32, 1, -1) if channels % groups == 0 and channels // groups >= at_least), 1
    )


def _group_norm(batch_norm: _BatchNorm, num_groups: int | None = None) -> nn.GroupNorm:
    num_groups = num_groups or _num_groups(batch_norm)
    assert num_groups is not None, "a repair is offered only where there is one"
    if batch_norm.num_features % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide the {batch_norm.num_features} channels of a "
            f"{type(batch_norm).__name__}: take a common divisor, or leave num_groups out."
        )
    group_norm = nn.GroupNorm(num_groups, batch_norm.num_features, eps=batch_norm.eps, affine=False)
    group_norm.affine = batch_norm.affine
    # the parameters are the same objects, so that tied parameters stay tied
    group_norm.weight, group_norm.bias = batch_norm.weight, batch_norm.bias
    return group_norm.train(batch_norm.training)


def _forget_statistics(norm: _InstanceNorm) -> nn.Module:
    norm.track_running_stats = False
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return norm


def _with_option(option: str, value: Any, module: nn.Module) -> nn.Module:
    setattr(module, option, value)
    return module


def validate_training_data(
    dataset: Any,
    units: Sized | None = None,
    *,
    target_delta: float | None,
    expected_batch_size: int,
    unit: PrivacyUnit,
) -> None:
    """Raise ValueError for data that cannot be drawn from by Poisson sampling, that δ and batch size do not fit, or
    that have a stored row more than ``unit.max_examples_per_person`` times.

    Args:
        units: What draws choose, if not rows.
    """
    if dataset is None:
        return
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"the training data are {_a(dataset)} without random access, which Poisson sampling needs. Use a "
            "map-style dataset (for a datasets.IterableDataset: load it without streaming)."
        )
    if len(dataset) == 0:
        raise ValueError("the training data set is empty: give it at least one row (a filter may have left none).")
    n = len(dataset if units is None else units)
    if target_delta is not None:
        require_small_delta(target_delta, n, name="target_delta")
    if expected_batch_size > n:
        raise ValueError(
            f"expected_batch_size={expected_batch_size} exceeds the {n} training "
            f"{'persons' if unit.is_person else 'examples'}. Lower it (or per_device_train_batch_size x "
            "gradient_accumulation_steps x processes, from which it derives; with PrivacyEngine the DataLoader's "
            "batch_size)."
        )
    if not unit.is_person:  # copies of a row have one owner
        refuse_repeated_rows(dataset, unit.max_examples_per_person)


def refuse_repeated_rows(dataset: Any, max_examples_per_person: int) -> None:
    """Raise ValueError if a stored row is in the data more than ``max_examples_per_person`` times."""
    index, copies = most_frequent_row(dataset)
    if copies > max_examples_per_person:
        raise ValueError(
            f"row {index} of the training data is stored once and comes {copies} times, but "
            f"max_examples_per_person={max_examples_per_person}, so epsilon would not hide all that is learned from "
            "it. Train on each row once, weight the losses of some, or say "
            f"max_examples_per_person={copies} (in a mechanism: unit=PrivacyUnit({copies})) for all copies together."
        )


def longest_input(model: nn.Module) -> int | None:
    """Return the largest number of positions of a text that the model has embeddings for; None where it looks up no
    embeddings of positions (rotary, ALiBi, ...)."""
    limits = []
    for path, module in model.named_modules():
        name = path.rsplit(".", 1)[-1]
        is_of_positions = name == "wpe" or ("position_embedding" in name and not name.startswith(_OF_BOXES))
        if type(module) is nn.Embedding and is_of_positions and not any(tower in path for tower in _TOWERS):
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    return min(limits, default=None)


_OF_BOXES = ("x_", "y_", "h_", "w_")  # where a word stands on its page
_TOWERS = ("vision", "visual", "image", "audio")  # parts of a model that read no text


def validate_lengths(model: nn.Module, dataset: Any, column: str = "input_ids") -> None:
    """Raise ValueError if an example is longer than the model's table of positions."""
    limit = longest_input(model)
    if limit is not None and len(dataset) and (longest := _longest_example(dataset, column)) > limit:
        raise ValueError(
            f"the training data has an example of {longest} tokens, but {type(model).__name__} has positions for "
            f"{limit} only. Truncate when tokenizing: tokenizer(..., truncation=True, max_length={limit})."
        )


def _longest_example(dataset: Any, column: str) -> int:
    features = getattr(dataset, "features", None)
    if features is not None and column in features and getattr(dataset, "format", {}).get("type") != "custom":
        import pyarrow.compute as pc

        # pyrefly: ignore[missing-attribute]  (pyarrow makes these functions when it is imported)
        lengths = pc.list_value_length(dataset.with_format("arrow")[:][column])
        return pc.max(lengths).as_py() or 0  # pyrefly: ignore[missing-attribute]
    first = dataset[0]
    if not (hasattr(first, "get") and hasattr(first.get(column), "__len__")):
        return 0
    # a data set may make each row when it is asked for it: at most 4096 of them
    step = 1 if isinstance(dataset, (list, tuple)) else -(-len(dataset) // 2**12)
    return max(len(dataset[i][column]) for i in range(0, len(dataset), step))
