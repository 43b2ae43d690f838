# Sourced by the other scripts: goes to the repository, leaves a complete .venv on PATH and defines
# free_port. $1 is the extra to install ("" or "dev"); PYTHON may name another interpreter.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra="${1:-}"
stamp="$(cksum < pyproject.toml | tr ' ' '-')"

is_complete() { # the development environment serves for both
    [ -x .venv/bin/python ] || return 1
    grep -qsx "$stamp" .venv/.complete-dev && return 0
    [ -z "$extra" ] && grep -qsx "$stamp" .venv/.complete-
}

if ! is_complete; then
    python="${PYTHON:-python3}"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "$python is older than Python 3.10: set PYTHON to a newer one" >&2
        exit 2
    }
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    echo "installing into .venv (the first time takes minutes)"
    .venv/bin/python -m pip install -q -e ".${extra:+[$extra]}"
    echo "$stamp" > ".venv/.complete-$extra"
fi
export PATH="$PWD/.venv/bin:$PATH"

free_port() { # so that runs beside each other on one machine do not meet at the launcher's 29500
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}
