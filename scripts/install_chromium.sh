#!/bin/sh
# Installs Debian's chromium for the tests of the report's page, where that is possible; without it they are skipped.
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium is missing, so the tests of the report's page are skipped: install it with your package manager."
    exit 0
fi
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 ||
    echo "chromium could not be installed, so the tests of the report's page are skipped."
