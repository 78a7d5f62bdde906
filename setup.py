"""The optional C extension: where it cannot be built, the package installs without it and runs on NumPy."""

from pathlib import Path

from setuptools import Extension, setup

_SOURCES = Path("dcr_s3/delta/native")

setup(
    ext_modules=[
        Extension(
            "dcr_s3.delta._native",
            sources=sorted(str(path) for path in _SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in _SOURCES.glob("*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra"],
            libraries=["m", "pthread"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
