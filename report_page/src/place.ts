// Where the reader is, in the fragment of the address: a link to a page opens it at the same completion and token.
import { useEffect, useState } from "preact/hooks";

export type Place = Record<string, string>;
type Change = Record<string, string | null>;

const listeners = new Set<(place: Place) => void>();
let now: Place = read();

function read(): Place {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

window.addEventListener("hashchange", () => {
  now = read();
  for (const listener of listeners) listener(now);
});

/** Change parts of the place; null and "" leave one out. `history` lets the reader come back with the browser's arrow. */
export function go(change: Change, history: "push" | "replace" = "replace") {
  const next = { ...now };
  for (const [name, value] of Object.entries(change)) {
    if (value === null || value === "") delete next[name];
    else next[name] = value;
  }
  now = next;
  const address = `#${new URLSearchParams(now)}`;
  if (history === "push") window.history.pushState(null, "", address);
  else window.history.replaceState(null, "", address);
  for (const listener of listeners) listener(now);
}

export function usePlace(): Place {
  const [place, setPlace] = useState(now);
  useEffect(() => {
    setPlace(now);
    listeners.add(setPlace);
    return () => void listeners.delete(setPlace);
  }, []);
  return place;
}
