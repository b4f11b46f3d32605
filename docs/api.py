"""Writes the API reference from the docstrings to a folder; a warning is an error."""

from __future__ import annotations

import argparse
import pkgutil
import warnings
from pathlib import Path

import pdoc

import jaxspec


def main() -> None:
    """Documents every module of both packages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    for name in jaxspec.__all__:
        getattr(jaxspec, name)  # pdoc looks only at what has been imported
    warnings.simplefilter("error")
    # A NamedTuple's constructor does not know the module that its annotations' names are from.
    warnings.filterwarnings("ignore", r"Error parsing type annotation ForwardRef\(")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*modules(), output_directory=args.folder)
    print(f"{args.folder}: {len(list(args.folder.rglob('*.html')))} pages")


def modules() -> list[str]:
    """Both packages, and what lies in jaxspec, whose `__all__` names no modules."""
    found = [module.name for module in pkgutil.iter_modules(jaxspec.__path__, "jaxspec.")]
    return ["jaxspec", *(name for name in found if "__main__" not in name), "kernels_pallas"]


if __name__ == "__main__":
    main()
