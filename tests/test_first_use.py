"""What data sets and collators keep when a row is first used: refused where it changes the rows of others."""

import collections
import functools
import itertools
import random
import types
from random import gauss

import numpy as np
import pandas
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from chats import tokenizer
from datasets import Dataset as Table
from models import build
from neighbours import LOOPS, Task, train
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import DataCollatorWithPadding, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator

from dp_transformers import DPTrainer, DPTrainingArguments
from dp_transformers.checks.validation import validate_lengths
from dp_transformers.data.draws import LogicalBatches
from dp_transformers.data.first_use import Memory
from dp_transformers.mechanism.sampling import Draw

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
SIZE = 32
_generator = torch.Generator().manual_seed(1)
RAW = [{"x": torch.randn(6, generator=_generator), "name": "abc"[i % 3]} for i in range(SIZE)]
CLASSES: dict = {}
NAMED = types.ModuleType("names_of_a_user")
exec("IDS = {}\ndef number(name): return IDS.setdefault(name, len(IDS))", NAMED.__dict__)
MEAN = None


class Own(Dataset):
    def __len__(self):
        return SIZE


def row(i, x=None, label=None):
    return {"x": RAW[i]["x"] if x is None else x, "labels": torch.tensor(i % 3 if label is None else label)}


class Labels(Own):
    def __init__(self):
        self.ids = {}

    def __getitem__(self, i):
        return row(i, label=self.ids.setdefault(RAW[i]["name"], len(self.ids)))


class Lazy(Own):
    mean = None

    def __getitem__(self, i):
        if self.mean is None:
            self.mean = RAW[i]["x"].mean()
        return row(i, RAW[i]["x"] - self.mean)


class InPlace(Own):
    def __init__(self):
        self.largest = torch.zeros(())

    def __getitem__(self, i):
        if not self.largest:
            self.largest.copy_(RAW[i]["x"].abs().max())
        return row(i, RAW[i]["x"] / self.largest)


class OfItsModule(Own):
    def __getitem__(self, i):
        return row(i, label=CLASSES.setdefault(RAW[i]["name"], len(CLASSES)))


class OfItsClass(Own):
    ids: dict = {}  # noqa: RUF012

    def __getitem__(self, i):
        return row(i, label=self.ids.setdefault(RAW[i]["name"], len(self.ids)))


class Transformed(Own):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, i):
        return self.transform(row(i))


class Statistics(nn.Module):
    """Of the first rows that it is given, in buffers."""

    def __init__(self, momentum=None):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", None if momentum is None else torch.zeros(()))
        self.register_buffer("spread", torch.zeros(()))

    def forward(self, x):
        if self.momentum is not None:
            self.mean = torch.lerp(self.mean, x.mean(), self.momentum)
            return x if self.training else x - self.mean
        self.mean = x.mean() if self.mean is None else self.mean
        self.spread.copy_(x.std() if not self.spread else self.spread)
        return (x - self.mean) / self.spread


class Frame(nn.Module):
    """Has it as a part."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Statistics()])

    def forward(self, each):
        return {**each, "x": self.parts[0](each["x"])}


class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = {}

    def forward(self, each):
        return {**each, "labels": torch.tensor(self.ids.setdefault(int(each["labels"]), len(self.ids)))}


class Vocabulary(collections.abc.MutableMapping):
    def __init__(self):
        self.ids = {}

    def __getitem__(self, key):
        return self.ids[key]

    def __setitem__(self, key, value):
        self.ids[key] = value

    def __delitem__(self, key):
        del self.ids[key]

    def __iter__(self):
        return iter(self.ids)

    def __len__(self):
        return len(self.ids)


class FirstClass(dict):
    """Tells in an attribute which class came first."""

    first = None

    def __missing__(self, key):
        self.first = key if self.first is None else self.first
        return int(key == self.first)


def by_number(numbers):
    return lambda each: {**each, "labels": torch.tensor(numbers(int(each["labels"])))}


def of_mapping(kind):
    codes = kind()
    return Transformed(by_number(lambda label: codes.setdefault(label, len(codes))))


def in_a_deque():
    steps = collections.deque([Encode()])
    return Transformed(lambda each: steps[0](each))


def centered():
    mean = None

    def transform(each):
        nonlocal mean
        mean = each["x"].mean() if mean is None else mean
        return {**each, "x": each["x"] - mean}

    return transform


def by_its_module(each):
    global MEAN
    MEAN = each["x"].mean() if MEAN is None else MEAN
    return {**each, "x": each["x"] - MEAN}


def of_a_table():
    ids = {}

    def transform(batch):
        return {
            "x": [torch.tensor(x) for x in batch["x"]],
            "labels": [torch.tensor(ids.setdefault(name, len(ids))) for name in batch["name"]],
        }

    rows = [{"x": each["x"].tolist(), "name": each["name"]} for each in RAW]
    return Table.from_list(rows).with_transform(transform)


def from_module(name):
    """A data set of a module of this name, which gives out classes on the fly."""
    module = types.ModuleType(name)
    exec(
        "IDS = {}\n"
        "def labelled(each):\n"
        "    return {**each, 'labels': each['labels'] * 0 + IDS.setdefault(int(each['labels']), len(IDS))}\n"
        "class Classes:\n"
        "    def __init__(self):\n"
        "        self.ids = {}\n"
        "    def __call__(self, each):\n"
        "        return {**each, 'labels': each['labels'] * 0 + self.ids.setdefault(int(each['labels']), len(self.ids))}\n",
        vars(module),
    )
    return module


DATA_SETS = {
    "classes": (Labels, "labels", "Labels.ids"),
    "lazy": (Lazy, "x", "Lazy.mean"),
    "in place": (InPlace, "x", "InPlace.largest"),
    "module": (OfItsModule, "labels", "CLASSES"),
    "class": (OfItsClass, "labels", "OfItsClass.ids"),
    "closure": (lambda: Transformed(centered()), "x", "mean"),
    "partial": (lambda: Transformed(functools.partial(centered())), "x", "mean"),
    "module variable": (lambda: Transformed(by_its_module), "x", "MEAN"),
    "subset": (lambda: Subset(Labels(), range(SIZE)), "labels", "Labels.ids"),
    "joined": (lambda: ConcatDataset([Lazy()]), "x", "Lazy.mean"),
    "table": (of_a_table, "labels", "ids"),
    "buffers": (lambda: Transformed(Frame()), "x", "Statistics.mean"),
    "attribute of a module": (lambda: Transformed(Encode()), "labels", "Encode.ids"),
    "UserDict": (lambda: of_mapping(collections.UserDict), "labels", "UserDict.data"),
    "mapping": (lambda: of_mapping(Vocabulary), "labels", "Vocabulary.ids"),
    "attribute of a dict": (lambda: Transformed(by_number(FirstClass().__getitem__)), "labels", "FirstClass.first"),
    "in a deque": (in_a_deque, "labels", "Encode.ids"),
    # whose names begin as those of libraries do
    "module variable of a like name": (lambda: Transformed(from_module("numpy_rows").labelled), "labels", "IDS"),
    "object of a like name": (lambda: Transformed(from_module("pandas_rows").Classes()), "labels", "Classes.ids"),
}


def stacked(rows):
    return {name: torch.stack([each[name] for each in rows]) for name in ("x", "labels")}


def looked_at(dataset, collate=stacked, draws=3):
    batches = LogicalBatches(dataset, collate, 8)
    return [batches[Draw(number, range(number, SIZE - 4))] for number in range(draws)]


@pytest.fixture(autouse=True)
def nothing_kept():
    global MEAN
    MEAN = None
    CLASSES.clear()
    NAMED.IDS.clear()
    OfItsClass.ids.clear()


@pytest.mark.parametrize("kept", DATA_SETS)
def test_rows_that_depend_on_the_first_ones(kept):
    make, column, name = DATA_SETS[kept]
    with pytest.raises(
        ValueError, match=rf"'{column}' of what the data set \(\w+\).*keeps what it met first.*({name})"
    ):
        looked_at(make())


def of_classes():
    ids = {}

    def collate(rows):
        labels = [ids.setdefault(each["name"], len(ids)) for each in rows]
        return {"x": torch.stack([each["x"] for each in rows]), "labels": torch.tensor(labels)}

    return collate


def of_words():
    ids = collections.defaultdict(lambda: len(ids))
    return lambda rows: {"x": torch.tensor([[float(ids[f"{x:.0f}"]) for x in each["x"]] for each in rows])}


class Scaler:
    def __init__(self):
        self.fitted = {}

    def __call__(self, rows):
        x = torch.stack([each["x"] for each in rows])
        if not self.fitted:
            self.fitted.update(mean=x.mean(0), std=x.std(0) + 1e-6)
        return {"x": (x - self.fitted["mean"]) / self.fitted["std"]}


def labelled(rows, labels):
    return {"x": torch.stack([each["x"] for each in rows]), "labels": torch.tensor(labels)}


class ModuleScaler(nn.Module):
    """Fitted on its first batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("is_fitted", torch.zeros(()))

    def forward(self, rows):
        x = torch.stack([each["x"] for each in rows])
        if not self.is_fitted:
            self.mean.copy_(x.mean(0))
            self.is_fitted.fill_(1)
        return {"x": x - self.mean}


def in_a_comprehension():
    return lambda rows: labelled(rows, [CLASSES.setdefault(each["name"], len(CLASSES)) for each in rows])


def by_another_module(rows):
    return labelled(rows, [NAMED.number(each["name"]) for each in rows])


def by_an_attribute():
    def collate(rows):
        return labelled(rows, [collate.ids.setdefault(each["name"], len(collate.ids)) for each in rows])

    collate.ids = {}
    return collate


def of_many_words(size):
    ids = {f"public {i}": i for i in range(size)}

    def collate(rows):
        return labelled(rows, [ids.setdefault(each["name"], len(ids)) for each in rows])

    return collate


class Largest:
    largest = 1e-6

    def __call__(self, rows):
        x = torch.stack([each["x"] for each in rows])
        self.largest = max(self.largest, float(x.abs().max()))
        return {"x": x / self.largest}

    def collate(self, rows):
        return self(rows)


COLLATORS = {
    "classes": (of_classes, "labels"),
    "words": (of_words, "x"),
    "scaler": (Scaler, "x"),
    "largest": (Largest, "x"),
    "module": (ModuleScaler, "x"),
    "method": (lambda: Largest().collate, "x"),
    "comprehension": (in_a_comprehension, "labels"),
    "function of a module": (lambda: by_another_module, "labels"),
    "attribute of a function": (by_an_attribute, "labels"),
    "many words": (lambda: of_many_words(6000), "labels"),
    "behind transformers": (lambda: RemoveColumnsCollator(of_classes(), ["x", "name"]), "labels"),
}


@pytest.mark.parametrize("kept", COLLATORS)
def test_batches_that_depend_on_the_first_ones(kept):
    make, column = COLLATORS[kept]
    with pytest.raises(ValueError, match=f"'{column}' of what the collator makes.*keeps what it met first"):
        looked_at(RAW, make())


# ---- what is kept without changing a row ----


class Cached(Own):
    """Keeps the last rows that it decoded."""

    def __init__(self, kind=dict):
        self.cache, self.hits, self.epoch = kind(), 0, 0

    def __getitem__(self, i):
        if i in self.cache:
            self.hits += 1
            if isinstance(self.cache, collections.OrderedDict):
                self.cache.move_to_end(i)
        else:
            self.cache[i] = self.made(i)
        if len(self.cache) > 6:
            self.cache.pop(next(iter(self.cache)))
        return dict(self.cache[i])

    def made(self, i):
        return row(i, RAW[i]["x"] * 2)


class CachedAugmented(Cached):
    """Keeps random numbers that it drew."""

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = row(i, RAW[i]["x"] + torch.randn(6) + random.random() + np.random.rand())
        return dict(self.cache[i])


class CachedByMethod(Own):
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def made(self, i):
        return RAW[i]["x"] * 2

    def __getitem__(self, i):
        return row(i, self.made(i))


class Env:
    is_open = False

    def __init__(self):
        self.is_mine = not Env.is_open
        if Env.is_open:
            raise RuntimeError("the environment is already open in this process")
        Env.is_open = True

    def __del__(self):
        Env.is_open = Env.is_open and not self.is_mine

    def get(self, i):
        return RAW[i]["x"]


class OpenedOnce(Own):
    """Opens its file when it is first read, once in a process, as lmdb has it."""

    def __init__(self):
        self.env = None

    def __getitem__(self, i):
        if self.env is None:
            self.env = Env()
        return row(i, self.env.get(i))


class Counting(Own):
    def __init__(self):
        self.loads, self.seen = 0, set()

    def __getitem__(self, i):
        self.loads += 1
        self.seen.add(i)
        return row(i)


class Noise(nn.Module):
    """Draws from a generator of its own, as augmentations do."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, each):
        return {**each, "x": each["x"] + torch.randn(6, generator=self.generator)}


class BesideLargeModule(Own):
    """Has more parts than are looked into, and an augmentation that lies deep."""

    def __init__(self):
        self.unused = nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(40))) for _ in range(40)))
        self.steps = {"train": [[[[Noise()]]]]}

    def __getitem__(self, i):
        return self.steps["train"][0][0][0][0](row(i))


class OfNoModule:
    """As types of Cython: the class has no name of a module."""

    __module__ = property(lambda self: "of_cython")

    def __call__(self, each):
        return each


def encoded():
    encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval().requires_grad_(False)
    return Transformed(lambda each: {**each, "x": encoder(each["x"][None])[0]})


HONEST = {
    "augmented by a module": lambda: Transformed(Noise()),
    "augmented beside a large module": BesideLargeModule,
    "frozen encoder": encoded,
    "a type of no module": lambda: Transformed(OfNoModule()),
    "dict": Cached,
    "least recently used": lambda: Cached(collections.OrderedDict),
    "augmented": CachedAugmented,
    "lru_cache": CachedByMethod,
    "file that opens once": OpenedOnce,
    "counter": Counting,
    "given classes": lambda: known(Labels()),
    "rows": lambda: [row(i) for i in range(SIZE)],
    "table": lambda: Table.from_list([{"x": each["x"].tolist(), "labels": 1} for each in RAW]).with_format("torch"),
}


def known(dataset):
    dataset.ids.update(a=0, b=1, c=2)
    return dataset


@pytest.mark.parametrize("kept", HONEST)
def test_caches_and_files_and_counters(kept):
    dataset = HONEST[kept]()
    for draw in looked_at(dataset, draws=5):
        assert sum(draw.sizes) == SIZE - 4 - draw.number
    if kept == "file that opens once":
        assert Env.is_open  # what was opened stays so
        dataset.env = None
        assert not Env.is_open


def test_a_data_set_that_its_owner_changes_between_draws():
    """A stronger augmentation in each pass, say."""
    dataset = Cached()
    batches = LogicalBatches(dataset, stacked, 8)
    for number in range(5):
        dataset.epoch, dataset.cache = number, {}
        dataset.made = lambda i, number=number: row(i, RAW[i]["x"] * number)
        found = torch.cat([each["x"] for each in batches[Draw(number, range(20))].physical_batches])
        assert torch.equal(found, torch.stack([each["x"] for each in RAW[:20]]) * number)


def test_a_tokenizer_keeps_how_it_was_called_last():
    tok = tokenizer()
    table = Table.from_list([{"text": "a b c " * (1 + i % 3)} for i in range(SIZE)])
    data = table.with_transform(lambda batch: tok(batch["text"], truncation=True, max_length=7))
    looked_at(data, DataCollatorWithPadding(tok), draws=3)


def test_what_was_kept_is_kept_again():
    """A look changes nothing that the owner sees."""
    dataset, twin = Cached(), Cached()
    looked_at(dataset)
    memory = Memory((stacked, dataset))
    before = dict(vars(dataset)), dict(dataset.cache)
    for i in range(20, 29):
        dataset[i]
    now = dict(vars(dataset)), dict(dataset.cache)
    assert {"Cached.cache"} <= set(memory.changed())
    [first] = memory.as_first(lambda: (dict(vars(dataset)), dict(dataset.cache)))
    assert first == before and (dict(vars(dataset)), dict(dataset.cache)) == now
    assert memory.as_first(lambda: 1 / 0) == [] and dict(dataset.cache) == now[1]
    memory.put_back()
    assert (dict(vars(dataset)), dict(dataset.cache)) == before and not memory.changed()
    assert twin.cache == {}


def test_a_module_that_was_not_changed_is_not_written_to():
    """It may be the model that is trained, which a collator holds."""
    module = nn.BatchNorm1d(3).requires_grad_(False)
    versions = [x._version for x in (*module.buffers(), *module.parameters())]
    memory = Memory(module)
    assert memory.as_first(lambda: 1) == [1] and not memory.changed()
    assert [x._version for x in (*module.buffers(), *module.parameters())] == versions
    module.running_mean.add_(1)
    assert memory.changed() == ["BatchNorm1d.running_mean"]
    memory.put_back()
    assert not module.running_mean.any()


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_number_that_is_none_from_now_on_has_changed(kind):
    dataset = Calibrated(total=kind([0.0, float("nan")]))
    memory = Memory((stacked, dataset))
    assert memory.changed() == [] == memory.collected()
    dataset.total[0] = float("nan")
    assert memory.changed() == ["Calibrated.total"] == memory.collected()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return {"logits": self.linear(x)}


def losses_of(outputs, labels):
    return F.cross_entropy(outputs["logits"], labels, reduction="none")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("loop", LOOPS)
def test_first_use_in_a_loop(loop, workers):
    task = Task(Net, Labels(), collate=stacked, loss=losses_of, bound=0.2, physical=32, expected=16, steps=4)
    task.workers = workers
    with pytest.raises(ValueError, match="keeps what it met first"):
        train(loop, task)
    task.rows = known(Labels())
    assert len(train(loop, task)) == 4


# ---- what is collected, and changes rows later ----


class Calibrated(Own):
    """Takes the mean of its first rows, and centers those after them."""

    def __init__(self, count=10_000, total=0.0):
        self.count, self.rows, self.total = count, 0, total

    def __getitem__(self, i):
        if self.rows < self.count:
            self.rows, self.total = self.rows + 1, self.total + float(RAW[i]["x"].mean())
            return row(i)
        return row(i, RAW[i]["x"] - self.total / self.rows)


class Counts(Own):
    """Keeps a whole number, and what it loaded late."""

    def __init__(self):
        self.rows, self.table, self.seen, self.generator = 0, None, [], random.Random(1)

    def __getitem__(self, i):
        self.rows += 1
        self.table = torch.ones(6) if self.table is None else self.table
        self.seen.append(self.generator.gauss(0, 1) + gauss(0, 1))
        return row(i, RAW[i]["x"] * self.table + self.seen[-1])


@pytest.mark.parametrize("total", [0.0, torch.zeros(()), np.zeros(())])
def test_numbers_that_are_collected_for_later_rows_are_refused(total):
    with pytest.raises(ValueError, match="collects numbers or words.*'Calibrated.total'"):
        looked_at(Calibrated(total=total))


@pytest.mark.parametrize("momentum", [0.1, 0.0])
def test_running_statistics_of_a_module_are_refused(momentum):
    """Of a mean that stays what it was no later row holds anything."""
    statistics = Statistics(momentum)
    data = Transformed(lambda each: {**each, "x": statistics(each["x"])})
    if not momentum:
        assert len(looked_at(data)) == 3
        return
    with pytest.raises(ValueError, match="collects numbers or words.*'Statistics.mean'"):
        looked_at(data)


def test_whole_numbers_and_what_is_loaded_late_are_no_statistics():
    assert len(looked_at(Counts())) == 3


class WarmsUp(Own):
    """Lets more of a row through, the more rows there were."""

    def __init__(self, holder):
        self.rows = holder

    def __getitem__(self, i):
        self.rows.update(rows=self.rows.get("rows", 0) + 1)
        x = RAW[i]["x"].clone()
        x[2 + self.rows["rows"] // 1000 :] = 0
        return row(i, x)


class OfAnEpoch(Own):
    """Is told its epoch, reads one shard at a time, and counts what it does."""

    def __init__(self):
        self.epoch, self.shard, self.rows, self.loads, self.recent = 3, -1, [], 0, {"row": 0}

    def __getitem__(self, i):
        self.loads, self.recent["row"] = self.loads + 1, i
        if self.shard != i // 8:
            self.shard, self.rows = i // 8, RAW[i // 8 * 8 : (i // 8 + 1) * 8]
        return row(i, self.rows[i % 8]["x"] * self.epoch)


def warming_up(count):
    """A collator that does the same by batches."""

    def collate(rows):
        count[0] += 1
        batch = stacked(rows)
        batch["x"][:, 2 + count[0] // 1000 :] = 0
        return batch

    return collate


def test_a_warm_up_by_the_number_of_rows_is_refused():
    with pytest.raises(
        ValueError, match="'x' of what the data set .WarmsUp. makes.*depends on how many.*it counts them"
    ):
        looked_at(WarmsUp({"rows": 1}))
    with pytest.raises(ValueError, match="'x' of what the collator makes.*depends on how many"):
        looked_at([row(i) for i in range(SIZE)], warming_up([1]))
    assert len(looked_at(OfAnEpoch())) == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_a_warm_up_in_a_loop(loop):
    task = Task(Net, OfAnEpoch(), collate=stacked, loss=losses_of, bound=0.2, physical=32, expected=16, steps=4)
    assert len(train(loop, task)) == 4
    task.collate = warming_up([1])
    with pytest.raises(ValueError, match="depends on how many were made before it"):
        train(loop, task)


def test_a_tokenizer_that_learns_words_is_refused():
    words = tokenizer()

    def collate(rows):
        words.add_tokens([f"{each['name']}{each['x'][0]:.3f}" for each in rows])
        return labelled(rows, [0 for _ in rows])

    with pytest.raises(ValueError, match="collects numbers or words.*its size"):
        looked_at(RAW, collate)


def in_series():
    codes = pandas.Series(dtype="int64")

    def number(name):
        if name not in codes.index:
            codes.loc[name] = len(codes)
        return int(codes.loc[name])

    return number


def in_tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel())

    def number(name):
        words.add_tokens([name])
        return words.token_to_id(name)

    return number


@pytest.mark.parametrize("kind", [in_series, in_tokenizer])
def test_what_is_not_looked_into_may_not_grow(kind):
    number = kind()
    with pytest.raises(ValueError, match="collects numbers or words.*(Series|Tokenizer), its size"):
        looked_at(RAW, lambda rows: labelled(rows, [number(each["name"]) for each in rows]))
    looked_at(RAW, lambda rows: labelled(rows, [number(each["name"]) for each in rows]))  # knows them all by now


@pytest.mark.parametrize("loop", LOOPS)
def test_a_collator_behind_that_of_trainer_is_looked_at(loop):
    """Trainer puts its own around it, which removes columns."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x, labels=None, name=None):
            return self.linear(x)

    loss = lambda scores, labels: F.cross_entropy(scores, labels, reduction="none")  # noqa: E731
    kept = Task(Net, RAW, of_classes(), loss, arguments={"remove_unused_columns": True})
    with pytest.raises(ValueError, match="keeps what it met first"):
        train(loop, kept)


class Words(Own):
    """Numbers its words on the fly."""

    def __init__(self, size=SIZE):
        self.size, self.ids, self.loads = size, {}, itertools.count()

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        next(self.loads)
        ids = [self.ids.setdefault(word, len(self.ids)) for word in (i % 11, i % 7 + 20, i % 5 + 40)]
        return {"input_ids": ids, "attention_mask": [1, 1, 1], "labels": i % 3}


def test_lengths_are_looked_at_before_the_first_use(tmp_path):
    """The trainer asks for the lengths of rows in their order, and by that would give their words numbers."""
    args = DPTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, expected_batch_size=8, noise_multiplier=1.0, target_delta=1e-4,
        use_cpu=True, report_to="none", save_strategy="no", per_device_train_batch_size=8,
    )  # fmt: skip
    data = Words()
    trainer = DPTrainer(build("bert"), args, default_data_collator, data)
    assert not data.ids
    with pytest.raises(ValueError, match="depends on which examples came before it"):
        trainer.train()


def test_lengths_of_a_sample_of_rows_are_looked_at():
    """To make every row of a large data set may take hours."""
    data = Words(10**6)
    validate_lengths(build("bert"), data)
    assert 1000 < next(data.loads) <= 2**12 + 1
    rows = [{"input_ids": [1, 2]}] * 5000 + [{"input_ids": [1] * 1000}]
    with pytest.raises(ValueError, match="an example of 1000 tokens"):  # a list has them all
        validate_lengths(build("bert"), rows + rows[:4999])
