#!/usr/bin/env bash
# All that needs a GPU, from a checkout, on any machine with one:
#
#   scripts/gpu.sh run [ARGUMENTS]   run the programme (default: main --limit-s 480) and print the table of targets
#   scripts/gpu.sh wheels            before that, where there is a network: collect in .whl what a bare machine lacks
#   scripts/gpu.sh unpack FILE       afterwards: put an archive's results into experiments/results, print the table
#
# A machine needs Python 3.11 or newer with torch, triton, numpy, scipy, pandas, pyarrow and rich, as images for
# PyTorch have; what else the programme imports is installed from .whl, beside the environment, without a network.
# PYTHON names the interpreter (default: python3), PYTHON_VERSION that of the machine for `wheels` (default: 3.12).
# If OUT names a folder, gpu_run.tar.gz and table.txt are written there after every step of the run.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MOST_BYTES=$((64 << 20))

# The package to install for each module that images for PyTorch lack, or may lack.
MISSING=(
    "yaml:PyYAML>=5.1"
    "packaging:packaging>=21"
    "narwhals:narwhals>=1.15"
    "simpy:simpy>=4.1"
    "hydra:hydra-core>=1.3.2,<1.4"
    "omegaconf:omegaconf>=2.2,<2.4"
    "antlr4:antlr4-python3-runtime==4.9.3" # published as source only
    "plotly:plotly>=6.0"
    "zstandard:zstandard>=0.22"
    "annotated_types:annotated-types>=0.6"
)

wheels() {
    rm -rf .whl
    mkdir .whl
    local version=${PYTHON_VERSION:-3.12} platforms=() name
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${name}_$(uname -m)")
    done
    for each in "${MISSING[@]}"; do
        if [ "${each%%:*}" = antlr4 ]; then
            "$PYTHON" -m pip wheel --quiet --no-deps -w .whl "${each#*:}"
        else
            "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
                --implementation cp "${platforms[@]}" -d .whl "${each#*:}"
        fi
    done
    local bytes
    bytes=$(cat .whl/*.whl | wc -c)
    echo ".whl: $(ls .whl | wc -l) wheels for Python $version, $((bytes >> 10)) KiB"
    if [ "$bytes" -gt "$MOST_BYTES" ]; then
        echo "the wheels are larger than the $((MOST_BYTES >> 20)) MiB that may be carried" >&2
        exit 1
    fi
}

# Installs what is missing from .whl into build/gpu_site, and puts it on the path.
install_missing() {
    local site=$PWD/build/gpu_site lacking=() each
    for each in "${MISSING[@]}"; do
        "$PYTHON" -c "import ${each%%:*}" 2> /dev/null || lacking+=("${each#*:}")
    done
    [ ${#lacking[@]} -eq 0 ] && return
    if ! compgen -G ".whl/*.whl" > /dev/null; then
        echo "$PYTHON lacks ${lacking[*]}: install them, or run scripts/gpu.sh wheels where there is a network" >&2
        exit 2
    fi
    rm -rf "$site"
    "$PYTHON" -m pip install --quiet --no-input --root-user-action ignore --no-index --no-deps --no-compile --no-cache-dir --find-links .whl \
        --target "$site" "${lacking[@]}"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
}

run() {
    install_missing
    [ $# -eq 0 ] && set -- main --limit-s 480
    "$PYTHON" -m experiments.gpu_run "$@"
}

unpack() {
    [ $# -eq 1 ] && [ -f "$1" ] || { echo "unpack FILE: name the gpu_run.tar.gz of a run" >&2; exit 2; }
    if tar -tzf "$1" | grep -qE '^/|(^|/)\.\.(/|$)'; then
        echo "$1: has paths that lead out of experiments/results; nothing was unpacked" >&2
        exit 2
    fi
    tar -xzf "$1" -C experiments/results --no-same-owner
    "$PYTHON" -m experiments.gpu_run table
}

case "${1:-}" in
    wheels | run | unpack) "$@" ;;
    *) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
