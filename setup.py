"""Three import packages from three source roots (see pyproject.toml for everything else).

`kernels/` and `engine/` are roots, not packages: an importable top-level `kernels` would shadow the Hugging Face
package of that name, which transformers imports.
"""

from setuptools import find_packages, setup

ROOTS = {"rise_kernels": "kernels", "rise_engine": "engine", "rise_rl": "."}

setup(
    packages=[p for name, root in ROOTS.items() for p in find_packages(root, include=[name, f"{name}.*"])],
    package_dir={name: name if root == "." else f"{root}/{name}" for name, root in ROOTS.items()},
    package_data={name: ["py.typed", "*.j2", "**/*.j2"] for name in ROOTS},
)
