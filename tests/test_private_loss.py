"""The logged loss: clipped per example, noised, paid for, and nothing else of the losses leaves a training."""

import math

import pytest
import torch
from chats import Sums as Grads
from models import build, losses_function
from test_trainer import N, arguments, draws, trainer_for  # noqa: F401  (draws: a fixture)
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMultipleChoice, BertForSequenceClassification, TrainerCallback
from world import World

from dp_transformers import (
    FlatClipping,
    IndependentNoise,
    Mechanism,
    PerExampleClipper,
    PoissonSampling,
    PrivacyEngine,
    Release,
    calibrate_noise_multiplier,
    compute_epsilon,
)
from dp_transformers.losses.heads import default_loss_bound
from dp_transformers.reports import certificate
from dp_transformers.step.ledger import PrivacyStateError
from dp_transformers.step.releases import PrivateLoss, loss_release

pytestmark = pytest.mark.halved

SIGMA, Q, STEPS, DELTA = 0.5473, 0.01024, 293, 1e-6  # a default fine-tuning: epsilon is 8
EXACT = 1e-9  # a noise factor at which the logged loss is the clipped mean


def default_mechanism(factor=None, sigma=SIGMA, **changes):
    releases = () if factor is None else (Release.within("loss", 0.0, 10.0, noise_multiplier=factor * sigma),)
    parts = {"sampling": PoissonSampling(100_000, 1024), "clipping": FlatClipping(1.0), "noise": IndependentNoise(sigma)}  # fmt: skip
    return Mechanism(**{**parts, "steps": STEPS, "releases": releases, **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "share", "epsilon", "sigma"),
    [(20, 0.998752, 8.0250, 0.5480), (10, 0.995037, 8.1148, 0.5500), (5, 0.980581, 8.4771, 0.5581), (2, 0.894427, 11.1507, 0.6119)],
)  # fmt: skip
def test_the_numbers_of_a_default_run(factor, share, epsilon, sigma):
    """Without raising the noise of gradients ε grows; raised, it stays 8. The numbers were computed with the
    accountant of dp_accounting, and that of this library is up to 1e-3 above."""
    assert default_mechanism().epsilon(DELTA) == pytest.approx(7.9951, rel=1e-3)
    joint = (SIGMA**-2 + (factor * SIGMA) ** -2) ** -0.5
    assert joint / SIGMA == pytest.approx(share, abs=5e-7)
    spent = default_mechanism(factor).epsilon(DELTA)
    assert spent == compute_epsilon(joint, Q, STEPS, DELTA) and spent == pytest.approx(epsilon, rel=1e-3)
    found = default_mechanism(factor, sigma=1.0).calibrated(target_epsilon=8.0, target_delta=DELTA)
    assert found.noise.noise_multiplier == pytest.approx(sigma, abs=3e-4)
    assert found.releases[0].noise_multiplier == pytest.approx(factor * found.noise.noise_multiplier)
    assert 7.99 < found.epsilon(DELTA) <= 8.0
    plain = calibrate_noise_multiplier(8.0, DELTA, Q, STEPS)
    assert found.noise.noise_multiplier * share == pytest.approx(plain, rel=1e-3)


def test_the_noise_of_a_logged_mean():
    release = Release("loss", 10.0, 5.5)
    assert release.noise_std / 1024 == pytest.approx(0.054, abs=5e-4)
    assert Release.within("loss", 0.0, 10.0, noise_multiplier=5.5).noise_std == release.noise_std / 2  # centered


@pytest.mark.parametrize("center", [math.inf, math.nan])
def test_the_center_is_finite(center):
    with pytest.raises(ValueError, match="finite center"):
        Release("loss", 1.0, 1.0, center)


def private_loss(factor=EXACT, low=0.0, high=4.0, **options):
    clipper = PerExampleClipper(torch.nn.Linear(2, 2), 1.0)
    return PrivateLoss(Release.within("loss", low, high, noise_multiplier=factor), clipper, **options)


def test_losses_are_clipped_and_weighted():
    """Those that are not a number count as the center, infinite ones as the bound, and rows of weight 0 as nothing."""
    losses = torch.tensor([0.5, 9.0, -3.0, math.nan, math.inf, -math.inf, 1.0], dtype=torch.bfloat16)
    loss = private_loss()
    loss.add(losses)
    assert float(loss.release(7)) == pytest.approx((0.5 + 4 + 0 + 2 + 4 + 0 + 1) / 7, abs=1e-6)
    loss.begin_draw()
    loss.add(losses, torch.tensor([1.0, 0, 0, 0, 0, 0, 0.5]))
    assert float(loss.release(4)) == pytest.approx(2 + (-1.5 - 0.5) / 4, abs=1e-6)
    loss.begin_draw()
    assert float(loss.release(4)) == pytest.approx(2, abs=1e-6)  # an empty draw says the center


@pytest.mark.parametrize("value", [-1e30, 0.0, 1e-3, 3.9, 1e30, math.nan, math.inf, -math.inf])
def test_one_example_moves_the_sum_by_the_bound_at_most(value):
    others, moved = torch.rand(50) * 9 - 2, []
    for losses in (others, torch.cat([others, torch.tensor([value])])):
        loss = private_loss()
        loss.add(losses)
        moved.append(float(loss.release(1.0)))
    assert abs(moved[1] - moved[0]) <= 2 * (1 + 1e-6)


def test_noise_has_the_planned_deviation_and_is_new_each_time():
    loss, seen = private_loss(factor=3.0), []
    for _ in range(4000):
        loss.begin_draw()
        seen.append(float(loss.release(8)))
    off = (torch.tensor(seen, dtype=torch.float64) - 2) * 8 / (3.0 * 2)
    assert abs(off.mean()) < 5 / math.sqrt(4000) and abs(off.std() - 1) < 5 / math.sqrt(8000)
    assert len(set(seen)) > 3990 and abs(torch.corrcoef(torch.stack([off[1:], off[:-1]]))[0, 1]) < 0.08


def one(row):
    """A batch of one row, as the draws have it."""
    return {name: column[None] for name, column in zip(("input_ids", "attention_mask", "labels"), row, strict=True)}


def logged(trainer, name="loss"):
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize(("physical", "batch", "twin"), [(2, 12, False), (5, 12, False), (30, 12, False), (5, 1, False), (5, 12, True)])  # fmt: skip
def test_the_logged_loss_is_the_clipped_mean_of_the_draw(tmp_path, draws, physical, batch, twin):  # noqa: F811
    """Of draws without examples it says the center, and without privacy the true mean."""
    model = build("bert").eval()  # without dropout
    trainer = trainer_for(
        tmp_path, model, noise_multiplier=1.0, loss_noise_factor=EXACT, loss_bound=1.2, learning_rate=0.0, max_steps=8,
        per_device_train_batch_size=physical, dp_seed=3, expected_batch_size=batch, without_privacy=twin,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    output = trainer.train()
    losses_of, expected = losses_function(model.eval()), []
    for rows in draws:
        losses = torch.tensor([float(losses_of(one(row)).detach()) for row in rows])
        clipped = 0.6 + float((losses.clamp(0, 1.2) - 0.6).sum()) / batch
        expected.append(float(losses.mean()) if twin else clipped)
    assert (trainer.privacy_spent().epsilon_per_person, trainer.privacy_spent().max_grad_norm < 1e9) == (
        math.inf,
        not twin,
    )
    assert len({len(rows) for rows in draws}) > 1 and (batch > 1 or [] in draws[1:])
    assert logged(trainer) == pytest.approx(expected, abs=1e-5)
    assert output.training_loss == output.metrics["train_loss"] == pytest.approx(sum(expected) / 8, abs=1e-5)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_gradients_and_their_noise_are_the_same_without_it(tmp_path):
    seen = []
    for raw in (False, True):
        grads = Grads()
        options = {"noise_multiplier": 1.0, "dp_seed": 7, "log_raw_metrics": raw}
        trainer_for(tmp_path / str(raw), callbacks=[grads], **options).train()
        seen.append(grads.steps)
    assert all(torch.equal(a, b) for x, y in zip(*seen, strict=True) for a, b in zip(x, y, strict=True))


def test_a_target_is_met_with_it(tmp_path):
    trainer = trainer_for(tmp_path, target_epsilon=5.0)
    trainer.train()
    spent, how = trainer.privacy_spent(), trainer.privacy_spent().mechanism
    assert how.releases == (
        Release.within("loss", 0.0, 4 + math.log(3), noise_multiplier=10 * how.noise.noise_multiplier),
    )
    assert spent.steps == 4 and 4.99 < spent.epsilon <= 5.0 == trainer.args.target_epsilon
    joint = how.noise.noise_multiplier / math.sqrt(1.01)
    assert spent.epsilon == pytest.approx(compute_epsilon(joint, 12 / N, 4, 1e-4), rel=1e-9)
    assert len(logged(trainer)) == 4 and all(map(math.isfinite, logged(trainer)))
    [run] = certificate.read(tmp_path)["runs"]
    assert run["mechanism"]["releases"][0]["name"] == "loss" and run["also_released"] == []
    assert run["epsilon"] == pytest.approx(spent.epsilon, rel=1e-9)


class Received(TrainerCallback):
    """Every name that a callback, and so every tracker, is given."""

    def __init__(self):
        self.names = set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.names |= set(logs)


def test_losses_without_noise_are_shown_and_never_kept(tmp_path, caplog):
    received = Received()
    trainer = trainer_for(tmp_path, callbacks=[received], log_raw_metrics=True, save_strategy="steps", save_steps=2)
    output = trainer.train()
    trainer.save_state()
    trainer.save_metrics("train", output.metrics)
    trainer.create_model_card()
    assert sum("raw_loss" in text and "NOT PRIVATE" in text for text in caplog.messages) == 4
    assert not any("loss" in name for name in received.names | set(output.metrics))
    assert math.isnan(output.training_loss) and "epsilon" in received.names
    texts = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    assert {"trainer_state.json", "train_results.json", "README.md"} <= {path.name for path in texts}
    shown = [text.split("raw_loss ")[1].split()[0].rstrip(",") for text in caplog.messages if "raw_loss " in text]
    for path in texts:
        content = path.read_text()
        assert "raw_loss" not in content and not any(f": {number}" in content for number in shown), path
    plain = calibrate_noise_multiplier(5.0, 1e-4, 12 / N, 4)
    assert trainer.privacy_spent().noise_multiplier == plain  # what the release would cost is given back
    assert trainer.privacy_spent().mechanism.releases == ()


def plain_mechanism(**changes):
    parts = {"sampling": PoissonSampling(N, 12), "clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0), "steps": 4}  # fmt: skip
    return Mechanism(**{**parts, **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_bound": 0.0}, "loss_bound must be a positive finite number"),
        ({"loss_bound": math.inf}, "loss_bound must be a positive finite number"),
        ({"loss_noise_factor": 0}, "loss_noise_factor must be a positive finite number"),
        ({"loss_noise_factor": "x"}, "loss_noise_factor must be an int or a float"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics=False cannot be used.*how large single draws"),
        ({"loss_bound": 3.0, "mechanism": plain_mechanism()}, "loss_bound=3.0 is given beside a mechanism"),
        (
            {"log_raw_metrics": True, "mechanism": plain_mechanism(releases=(Release("loss", 1.0, 9.0),))},
            "log_raw_metrics=True is given beside a mechanism that releases the loss",
        ),
    ],
)
def test_settings_that_are_refused(tmp_path, changes, message):
    beside = {"target_epsilon": None, "expected_batch_size": None, "max_steps": -1} if "mechanism" in changes else {}
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **{**beside, **changes})


def test_the_bound_follows_the_head():
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 30}  # fmt: skip
    assert default_loss_bound(build("bert")) == pytest.approx(4 + math.log(3))
    assert default_loss_bound(build("llama", lora=True)) == pytest.approx(4 + math.log(1000))
    several = BertConfig(**small, num_labels=5, problem_type="multi_label_classification")
    assert default_loss_bound(BertForSequenceClassification(several)) == pytest.approx(4 + math.log(2))
    assert default_loss_bound(BertForSequenceClassification(BertConfig(**small, num_labels=1))) == 10
    assert default_loss_bound(BertForMultipleChoice(BertConfig(**small))) == 10
    assert default_loss_bound(torch.nn.Linear(2, 2)) == 10


def saving(folder, **changes):
    return trainer_for(folder, **{"noise_multiplier": 1.0, "save_strategy": "steps", "save_steps": 2, **changes})


def test_a_run_keeps_what_it_was_begun_with(tmp_path):
    """Begun with the release, it goes on with it, and asking for another, or for raw values, is refused by name."""
    saving(tmp_path, max_steps=2).train()
    for changes in ({"log_raw_metrics": True}, {"loss_noise_factor": 5.0}, {"loss_bound": 2.0}):
        with pytest.raises(PrivacyStateError, match=r"trained with releases=\[\{'name': 'loss'"):
            saving(tmp_path, **changes).train(resume_from_checkpoint=True)
    resumed = saving(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    joint = (1 + 1 / 100) ** -0.5
    assert resumed.privacy_spent().epsilon == pytest.approx(compute_epsilon(joint, 12 / N, 4, 1e-4), rel=1e-9)
    assert len(logged(resumed)) == 4


def test_a_run_that_was_begun_without_it_goes_on_without_it(tmp_path):
    saving(tmp_path, max_steps=2, log_raw_metrics=True).train()
    with pytest.raises(PrivacyStateError, match=r"trained with releases=\[\], now it is"):
        saving(tmp_path, loss_bound=2.0).train(resume_from_checkpoint=True)
    resumed = saving(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert not logged(resumed) and resumed.privacy_spent().epsilon == compute_epsilon(1.0, 12 / N, 4, 1e-4)


def by_engine(reduction="none", criterion=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    rows = [(torch.randn(3), torch.tensor(i % 2)) for i in range(40)]
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=DataLoader(rows, 8), max_physical_batch_size=3,
        loss_reduction=reduction, criterion=criterion, self_check=False, **options,
    )  # fmt: skip
    return engine, made


@pytest.mark.parametrize("with_criterion", [False, True])
def test_an_engine_releases_it_where_it_is_asked_to(with_criterion):
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "loss_bound": 0.8, "loss_noise_factor": EXACT}
    criterion = torch.nn.CrossEntropyLoss() if with_criterion else None
    engine, (model, optimizer, *_, loader) = by_engine("mean" if with_criterion else "none", criterion, **options)
    private_criterion = _[0] if with_criterion else None
    assert engine.private_loss is None
    seen, total, bounded = [], 0.0, torch.nn.CrossEntropyLoss(reduction="none")
    for x, y in loader:
        optimizer.zero_grad()
        losses = bounded(model(x), y)
        total += float((losses.detach().clamp(0, 0.8) - 0.4).sum())
        private_criterion(model(x), y).backward() if with_criterion else engine.backward(losses)
        steps = engine.steps
        optimizer.step()
        if engine.steps > steps:
            assert engine.private_loss == pytest.approx(0.4 + total / 8, abs=1e-5)
            seen, total = [*seen, engine.private_loss], 0.0
    assert len(seen) == 5
    joint = (1 + EXACT**-2) ** -0.5
    assert engine.get_epsilon(1e-3) == compute_epsilon(joint, 0.2, 5, 1e-3)


def test_an_engine_is_silent_otherwise_and_needs_losses_of_examples():
    engine, (model, optimizer, loader) = by_engine(noise_multiplier=1.0, max_grad_norm=1.0)
    for x, y in loader:
        engine.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.private_loss is None and engine.get_epsilon(1e-3) == compute_epsilon(1.0, 0.2, 5, 1e-3)
    with pytest.raises(ValueError, match="hands over one loss for the batch"):
        by_engine("mean", noise_multiplier=1.0, max_grad_norm=1.0, loss_bound=1.0)
    for beside in ({"loss_bound": 1.0}, {"loss_noise_factor": 5.0}):
        with pytest.raises(ValueError, match="loss_bound or loss_noise_factor is given beside a mechanism"):
            by_engine(mechanism=plain_mechanism(), **beside)
    engine, _ = by_engine(
        mechanism=plain_mechanism(sampling=PoissonSampling(40, 8), releases=(Release("loss", 1.0, 9.0),))
    )
    assert loss_release(engine.privacy_spent(1e-3).mechanism).bound == 1.0


def exact(folder):
    """What a training of five steps logs where the noise is too little to see."""
    model = build("bert")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer = trainer_for(
        folder, model, noise_multiplier=0.01, loss_noise_factor=EXACT, dp_seed=3, learning_rate=0.0, max_steps=5
    )
    trainer.train()
    return logged(trainer)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_two_processes_release_the_loss_of_one_with_noise_once(tmp_path):
    world = World("test_private_loss", tmp_path)
    first, second = world.run("as_rank", "two")
    world.end()
    assert first == second and first["trained"] == pytest.approx(exact(tmp_path / "one"), abs=1e-5)
    off = (torch.tensor(first["noised"], dtype=torch.float64) - 2) * 8 / (3.0 * 2)
    assert abs(off.std() - 1) < 5 / math.sqrt(2 * len(off)), "of one process, not of both"


def as_rank(folder):
    loss, noised = private_loss(factor=3.0), []
    for _ in range(1000):
        loss.begin_draw()
        noised.append(float(loss.release(8)))
    return {"noised": noised, "trained": exact(folder)}
