import { useMemo, useState } from "preact/hooks";
import type { Completion, Data } from "../data";
import { number, percent, visible } from "../format";
import { go, usePlace } from "../place";
import { type Look, type Span, look, span } from "./attention";
import { HEAT, Overlay } from "./Overlay";

interface Props {
  completion: Completion;
  images: Data["images"];
  lit: boolean;
  /** None: the whole completion; two: side by side. */
  tokens: number[];
  onAll: () => void;
  /** Whether the next token that is chosen stands beside the first. */
  comparing: boolean;
  onCompare: () => void;
}

/** The images of a prompt, and where in them the tokens looked. */
export function Looking({ completion, images, lit, tokens, onAll, comparing, onCompare }: Props) {
  const place = usePlace();
  const [opacity, setOpacity] = useState(Number(place.opacity ?? 50) / 100);
  const [grid, setGrid] = useState(place.grid === "1");
  const whom = tokens.length ? tokens : [null];
  const looks = useMemo(() => whom.map((token) => look(completion, token)), [completion, tokens.join()]);
  const seen = looks.filter((item) => item !== null);
  const range = useMemo(() => span(seen), [looks]);
  const several = completion.images.length > 1;
  const regions = completion.images.some((picture) => picture.regions?.length);
  const changed = completion.images.some((picture) => picture.perturbed);
  return (
    <div class="look">
      {!seen.length && <p class="whose">The attention over the image was not recorded, or had no room in this page.</p>}
      {seen.length > 0 && !lit && <p class="whose">Attention is not drawn.</p>}
      {lit && whom.map((token, side) => looks[side] && (
        <p key={side} class="whose" aria-live="polite">
          Coloured{whom.length > 1 && ["", " in the middle", " at the right"][side + 1]} where <b>{token === null ? "the whole completion" : <>“{visible(completion.tokens[token]!).trim() || "␣"}” (token {token + 1})</>}</b> looked: {percent(looks[side].mass)} of its attention is on the {several ? "images" : "image"}.
        </p>
      ))}
      {completion.images.map((picture, index) => {
        const shared = { picture, index, count: completion.images.length, source: thumbnail(images, picture.file), span: range, opacity, grid, regions };
        const drawn = lit ? whom.flatMap((token, side) => (looks[side]?.images[index] ? [{ token, own: looks[side] }] : [])) : [];
        return (
          <div key={index} class="beside" style={{ "--count": drawn.length + 1 }}>
            <Overlay {...shared} cells={null} mass={0} whose="" />
            {drawn.map(({ token, own }) => (
              <Overlay key={token} {...shared} whose={token === null ? "the whole completion" : `token ${token + 1}`} cells={own.images[index]!} mass={own.mass} />
            ))}
          </div>
        );
      })}
      {seen.length > 0 && lit && <Bar span={range} looks={seen} opacity={opacity} />}
      {tokens.length > 0 && (
        <p class="choices">
          <button type="button" onClick={onAll}>Whole completion</button>
          <button type="button" aria-pressed={comparing} onClick={onCompare}>{comparing ? "Choose the other token" : "Compare with another token"}</button>
        </p>
      )}
      {seen.length > 0 && lit && (
        <p class="choices">
          <label>Opacity <input type="range" min="0" max="100" value={Math.round(100 * opacity)} onInput={(event) => setOpacity(Number(event.currentTarget.value) / 100)} onChange={(event) => go({ opacity: event.currentTarget.value })} /></label>
          <label><input type="checkbox" checked={grid} onChange={(event) => { setGrid(event.currentTarget.checked); go({ grid: event.currentTarget.checked ? "1" : null }); }} /> Token grid</label>
        </p>
      )}
      {changed && (
        <div class="perturbed">
          <p class="muted">As it is, and perturbed for the dependency on the image</p>
          {completion.images.map((picture, index) => picture.perturbed && (
            <div key={index} class="pair">
              <img src={thumbnail(images, picture.file) ?? undefined} alt={`Image ${index + 1}`} />
              <img src={thumbnail(images, picture.perturbed) ?? undefined} alt={`Image ${index + 1} as it was perturbed`} />
            </div>
          ))}
          <Changed completion={completion} />
        </div>
      )}
    </div>
  );
}

const MOST_CHANGED = 6;

/** The words whose probability the perturbation changed most. */
function Changed({ completion: { tokens, changes } }: { completion: Completion }) {
  const found = (changes ?? [])
    .flatMap((change, token) => (change ? [{ change, token }] : []))
    .sort((a, b) => Math.abs(b.change) - Math.abs(a.change))
    .slice(0, MOST_CHANGED);
  if (!found.length) return null;
  return (
    <ul class="changed" aria-label="Words that changed most in probability">
      {found.map(({ change, token }) => (
        <li key={token}><b>{visible(tokens[token]!).trim() || "␣"}</b> {change < 0 ? "less" : "more"} likely: × {number(Math.exp(change), 2)}</li>
      ))}
    </ul>
  );
}

function thumbnail(images: Data["images"], file: string | null): string | null {
  return file !== null && images[file] ? `data:image/webp;base64,${images[file]}` : null;
}

/** What the colours mean: multiples of an even share of the attention on the images. */
function Bar({ span: { low, high }, looks, opacity }: { span: Span; looks: Look[]; opacity: number }) {
  const mean = looks.reduce((sum, { mass, cells }) => sum + mass / cells, 0) / looks.length;
  if (!(high > low)) return <p class="muted">It looks everywhere alike.</p>;
  return (
    <p class="heatbar">
      The colour goes from {number(low / mean, 2)} × <i style={{ backgroundImage: `linear-gradient(90deg, transparent, rgb(${HEAT.join(" ")} / ${opacity}))` }} /> to {number(high / mean, 2)} × an even share{looks.length > 1 && " of both"}.
    </p>
  );
}
