// Puts the licences of the libraries and the hash of the sources into the built page, and the page into the package.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const OUTPUT = "../src/vgr_trl/reporting/page.html";
const LEFT_OUT = new Set(["node_modules", "dist", ".gitignore"]);

// test_page.py computes the same: "path\n", content, "\n" of every file, in the order of the paths.
function sourcesHash() {
  const files = readdirSync(".", { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name).replaceAll("\\", "/"))
    .filter((path) => !path.split("/").some((part) => LEFT_OUT.has(part)))
    .sort();
  const hash = createHash("sha256");
  for (const path of files) hash.update(`${path}\n`).update(readFileSync(path)).update("\n");
  return hash.digest("hex");
}

const licences = readFileSync("dist/licences.md", "utf8");
if (/<\/script|<!--/i.test(licences)) throw new Error("a licence would break out of its place");
const page = readFileSync("dist/index.html", "utf8")
  .replace("LICENCES_GO_HERE", () => `\n${licences.trim()}\n`)
  .replace("<title>", () => `<meta name="vgr-trl-page-sources" content="${sourcesHash()}" />\n    <title>`);
writeFileSync(OUTPUT, page);
console.log(`${OUTPUT}: ${(page.length / 1e3).toFixed(0)} kB`);
