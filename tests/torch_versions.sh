#!/usr/bin/env bash
# The adapter tests under several versions of torch, each in a virtual environment of its own.
#
#   torch_versions.sh [VERSION...]     default: every supported minor version
#
# The environments stay in .venv-torch/<version> (5 to 7 GB each where only CUDA builds of torch are found), the whole
# output in <version>/install.log and <version>/test.log beside them. Dependencies are those of constraints.txt without
# its pins of torch and of Triton, of which each torch demands its own. PYTHON chooses the interpreter. Exits with 1 if a version failed, with 2 if nothing could be run.
set -uo pipefail

readonly DEFAULT_VERSIONS=(2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1)
readonly PYTHON=${PYTHON:-python3}

find_root() {
    local at
    at=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    while [[ $at != / && ! -f $at/pyproject.toml ]]; do at=$(dirname "$at"); done
    [[ $at != / ]] && printf '%s\n' "$at"
}

# install VERSION ENV: make ENV, unless it is newer than what it was made from.
install() {
    local version=$1 env=$2
    if [[ -f $env/.installed && $env/.installed -nt pyproject.toml && $env/.installed -nt constraints.txt ]]; then
        return 0
    fi
    rm -f "$env/.installed"
    { [[ -x $env/bin/python ]] || "$PYTHON" -m venv "$env"; } &&
        grep -vE '^(torch|triton)[=<>~! ;]' constraints.txt > "$env/constraints.txt" &&
        "$env/bin/python" -m pip install --disable-pip-version-check --progress-bar off -c "$env/constraints.txt" \
            "torch==$version" -e '.[dev]' transformers &&
        "$env/bin/python" -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != sys.argv[1])' "$version" &&
        touch "$env/.installed"
}

# count REPORT: "passed failed skipped" of a JUnit report; an error in a fixture or an import counts as a failure.
count() {
    "$PYTHON" - "$1" <<'END'
import sys
import xml.etree.ElementTree as tree

suites = tree.parse(sys.argv[1]).getroot().iter("testsuite")
total, failed, skipped = 0, 0, 0
for suite in suites:
    total += int(suite.get("tests", 0))
    failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped += int(suite.get("skipped", 0))
print(total - failed - skipped, failed, skipped)
END
}

main() {
    local root versions=("$@") rows=() failed_versions=0
    root=$(find_root) || { echo "no pyproject.toml above ${BASH_SOURCE[0]}" >&2; return 2; }
    cd "$root" || return 2
    [[ ${#versions[@]} -gt 0 ]] || versions=("${DEFAULT_VERSIONS[@]}")
    local version env log started seconds passed failed skipped status
    for version in "${versions[@]}"; do
        env=.venv-torch/$version
        mkdir -p "$env"
        echo "torch $version: installing ($env/install.log)"
        if ! install "$version" "$env" > "$env/install.log" 2>&1; then
            tail -n 5 "$env/install.log" >&2
            rows+=("$version|-|-|-|-|not installed, see $env/install.log")
            failed_versions=$((failed_versions + 1))
            continue
        fi
        log=$env/test.log
        echo "torch $version: testing ($log)"
        rm -f "$env/report.xml"
        started=$SECONDS
        "$env/bin/python" -m pytest tests/fsdp -q --no-header -p no:cacheprovider \
            --junitxml "$env/report.xml" > "$log" 2>&1
        status=$?
        seconds=$((SECONDS - started))
        if ! read -r passed failed skipped < <(count "$env/report.xml" 2> /dev/null); then
            passed=- failed=- skipped=-
        fi
        if [[ $status -eq 0 ]]; then
            rows+=("$version|$passed|$failed|$skipped|$seconds|")
        else
            grep -E '^(FAILED|ERROR) ' "$log" >&2 || tail -n 5 "$log" >&2
            rows+=("$version|$passed|$failed|$skipped|$seconds|pytest exited with $status, see $log")
            failed_versions=$((failed_versions + 1))
        fi
    done

    printf '\n%-10s %7s %7s %8s %8s\n' torch passed failed skipped seconds
    local row note
    for row in "${rows[@]}"; do
        IFS='|' read -r version passed failed skipped seconds note <<< "$row"
        printf '%-10s %7s %7s %8s %8s%s\n' "$version" "$passed" "$failed" "$skipped" "$seconds" "${note:+  $note}"
    done
    [[ $failed_versions -eq 0 ]]
}

main "$@"
