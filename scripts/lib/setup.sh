# Sourced by the scripts beside it: a virtual environment in the checkout, made once and reused while its inputs stay the same.
# Needs python3 >= 3.11; a C compiler is optional (without one the package uses its NumPy kernels).

say() { printf '[%s] %s\n' "$1" "$2" >&2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "python3 >= 3.11 is needed (set PYTHON=... to choose one)" >&2
    return 1
}

setup_stamp() {
    { "$1" --version; cat pyproject.toml constraints.txt setup.py; find dcr_s3 \( -name '*.c' -o -name '*.h' \) -print0 | sort -z | xargs -0r cat; } 2>/dev/null \
        | sha256sum | cut -d' ' -f1
}

# Leaves the checkout as working directory and its virtual environment first on PATH.
ensure_environment() {
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    local python stamp
    if ! .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$(find_python)
        say setup "creating .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv
    fi
    export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
    unset PYTHONHOME
    stamp=$(setup_stamp .venv/bin/python)
    if [ "$(cat .venv/dcr-stamp 2>/dev/null)" != "$stamp" ]; then
        say setup "installing dcr_s3 and its tools at the versions of constraints.txt (minutes the first time)"
        .venv/bin/python -m pip install -qq --constraint constraints.txt setuptools
        .venv/bin/python -m pip install -qq --constraint constraints.txt --no-build-isolation --editable '.[dev]'
        echo "$stamp" > .venv/dcr-stamp
    fi
}

# A browser for the dashboard's tests, which are skipped without one. Only for CI: nobody else's system is changed.
ensure_browser() {
    local name
    for name in chromium chromium-headless-shell google-chrome; do
        if command -v "$name" > /dev/null; then return; fi
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        say setup "installing chromium-headless-shell"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell; } > /dev/null 2>&1 \
            || say setup "no browser could be installed: the tests that need one are skipped"
    fi
}
