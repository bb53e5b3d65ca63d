"""The packages of the distribution: those of dp_transformers, and the recipes, which the command `train` runs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dp_transformers*"]), "dp_transformers.recipes"],
    package_dir={"dp_transformers.recipes": "recipes"},
    package_data={
        "dp_transformers": ["py.typed", "reports/templates/*"],
        "dp_transformers.recipes": ["accelerate/*.yaml", "configs/*.yaml"],
    },
)
