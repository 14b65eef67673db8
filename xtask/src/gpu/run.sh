#!/bin/sh
# Starts the checks of this folder with the libtorch 2.11.0 of this machine. LIBTORCH says which; without it, it is the torch of
# the active Python, or of the one that PYTHON names. It changes nothing on the machine but for the
# report, and in TMPDIR a folder that stays if it is ended by a signal. `./run --help` says more.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")" && pwd)
python=${PYTHON:-python3}
home=${LIBTORCH:-}
if [ -z "$home" ]; then
    # Packages may print something of theirs when they are imported, and at the end.
    home=$("$python" -c 'import importlib.util; print(*importlib.util.find_spec("torch").submodule_search_locations)' \
        2>/dev/null | grep '^/.*torch$' | tail -n 1) || home=
fi
if [ -z "$home" ]; then
    echo "run: no libtorch: LIBTORCH is not set, and $python has no torch. Set LIBTORCH to the folder of libtorch 2.11.0 with" \
        "CUDA, or PYTHON to a Python that has torch 2.11.0" >&2
    exit 1
fi
for library in libtorch_cpu.so libtorch_cuda.so; do
    if [ ! -e "$home/lib/$library" ]; then
        echo "run: $home/lib has no $library; wanted is libtorch 2.11.0 with CUDA. LIBTORCH says where it is" >&2
        exit 1
    fi
done
# The torch of a Python says its version in one file, and the archive of libtorch in the other.
version=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$home/version.py" 2>/dev/null || cat "$home/build-version" 2>/dev/null) || version=
case $version in
"" | 2.11.*) ;;
*)
    echo "run: $home is libtorch $version; wanted is libtorch 2.11.0 with CUDA. LIBTORCH says where it is" >&2
    exit 1
    ;;
esac

LD_LIBRARY_PATH="$home/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
exec "$here/gpu-checks" --python "$python" --commit "$(cat "$here/commit")" "$@"
