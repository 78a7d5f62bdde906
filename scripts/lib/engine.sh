# Sourced by scripts/test: the serving engine's own environment, .venv-vllm, made once and reused while its inputs stay the same.
# It cannot share one with the project's tools, whose versions differ. About 2.5 GB and two minutes.

# Returns 1, having said so, where the engine cannot be installed; its tests are then skipped.
ensure_engine() {
    local stamp
    stamp=$({ .venv/bin/python --version; cat tests/engine/vllm-pins.txt pyproject.toml; } | sha256sum | cut -d' ' -f1)
    if [ "$(cat .venv-vllm/dcr-stamp 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    say setup "installing the serving engine at the versions of tests/engine/vllm-pins.txt into .venv-vllm (minutes)"
    if install_engine; then
        echo "$stamp" > .venv-vllm/dcr-stamp
    else
        say setup "THE SERVING ENGINE COULD NOT BE INSTALLED: tests/engine will be skipped"
        rm -rf .venv-vllm
        return 1
    fi
}

install_engine() {
    local uv=(env "UV_FIND_LINKS=${PIP_FIND_LINKS:-}" .venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python --no-deps)
    .venv/bin/python -m venv .venv-vllm &&
        .venv-vllm/bin/python -m pip install -qq uv &&
        "${uv[@]}" --compile-bytecode -r tests/engine/vllm-pins.txt &&
        "${uv[@]}" --no-build-isolation --editable .
}
