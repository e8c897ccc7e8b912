#!/usr/bin/env bash
# Installs the Debian packages that some tests drive: prometheus (the metrics tests) and chromium
# (the page tests). Where that cannot be, it says why and succeeds: those tests then skip.
set -u

missing=()
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium)
[ ${#missing[@]} -eq 0 ] && exit 0

skip() {
    echo "system-deps: ${missing[*]} not installed: $1. The tests that need them will skip."
    exit 0
}

[ "${SYSTEM_DEPS:-yes}" = no ] && skip "SYSTEM_DEPS=no"
command -v apt-get >/dev/null || skip "there is no apt-get here"
[ "$(id -u)" -eq 0 ] || skip "not root (run: sudo apt-get install ${missing[*]})"

# The packages are wanted as programs: their services must not start.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi

echo "system-deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
timeout 120 apt-get -qq update >"$log" 2>&1 || true # the lists at hand may do
if ! timeout 300 apt-get -qq install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; then
    tail -n 5 "$log"
    rm -f "$log"
    skip "apt-get failed"
fi
rm -f "$log"
