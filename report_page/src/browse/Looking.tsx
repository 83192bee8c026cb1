import { useMemo, useState } from "preact/hooks";
import { type Completion, type Data, thumbnail } from "../data";
import { number, percent, visible } from "../format";
import { go, usePlace } from "../place";
import { type Look, type Part, type Span, look, span, written } from "./attention";
import { captions } from "./Turns";
import { HEAT, Overlay } from "./Overlay";
import { saying } from "./Tokens";

interface Props {
  completion: Completion;
  images: Data["images"];
  lit: boolean;
  /** None: the whole completion, or the turn; two: side by side. */
  tokens: number[];
  turn: number | null;
  onAll: () => void;
  /** Whether the next token that is chosen stands beside the first. */
  comparing: boolean;
  onCompare: () => void;
}

/** The images of a prompt, and where in them the tokens looked. */
export function Looking({ completion, images, lit, tokens, turn, onAll, comparing, onCompare }: Props) {
  const place = usePlace();
  const [opacity, setOpacity] = useState(Number(place.opacity ?? 50) / 100);
  const [grid, setGrid] = useState(place.grid === "1");
  const whom = useMemo<Part[]>(
    () => (tokens.length ? tokens.map((token) => ({ tokens: [token], name: `token ${token + 1}` })) : [written(completion, turn)]),
    [completion, tokens.join(), turn],
  );
  const looks = useMemo(() => whom.map((part) => look(completion, part)), [completion, whom]);
  const titles = useMemo(() => captions(completion), [completion]);
  const seen = looks.filter((item) => item !== null);
  const range = useMemo(() => span(seen), [looks]);
  const several = completion.images.length > 1;
  const layers = completion.metrics && !completion.metrics.late ? "all layers" : "the late layers"; // as Python's late_layers
  const regions = completion.images.some((picture) => picture.regions?.length);
  const changed = completion.images.some((picture) => picture.perturbed);
  return (
    <div class="look">
      {!seen.length && <p class="whose">The attention over the image was not recorded, or had no room in this page.</p>}
      {seen.length > 0 && !lit && <p class="whose">Attention is not drawn.</p>}
      {lit && whom.map(({ name }, side) => looks[side] && (
        <p key={side} class="whose" aria-live="polite">
          Coloured{whom.length > 1 && ["", " in the middle", " at the right"][side + 1]} where <b>{tokens.length ? <>“{visible(completion.tokens[tokens[side]!]!).trim() || "␣"}” ({name})</> : name}</b> looked: {percent(looks[side].mass)} of its attention in {layers} is on the {several ? "images" : "image"}.
        </p>
      ))}
      {completion.images.map((picture, index) => {
        const shared = { picture, name: titles[index]!, several, source: thumbnail(images, picture.file), span: range, opacity, grid, regions };
        const drawn = lit ? whom.flatMap(({ name }, side) => (looks[side]?.images[index] ? [{ name, own: looks[side] }] : [])) : [];
        return (
          <div key={index} class="beside" style={{ "--count": drawn.length + 1 }}>
            <Overlay {...shared} cells={null} mass={0} whose="" />
            {drawn.map(({ name, own }) => (
              <Overlay key={name} {...shared} whose={name} cells={own.images[index]!} mass={own.mass} />
            ))}
          </div>
        );
      })}
      {seen.length > 0 && lit && <Bar span={range} looks={seen} opacity={opacity} />}
      {(tokens.length > 0 || turn !== null) && (
        <p class="choices">
          <button type="button" onClick={onAll}>Whole completion</button>
          {tokens.length > 0 && <button type="button" aria-pressed={comparing} onClick={onCompare}>{comparing ? "Choose the other token" : "Compare with another token"}</button>}
        </p>
      )}
      {seen.length > 0 && lit && (
        <p class="choices">
          <label>Opacity <input type="range" min="0" max="100" value={Math.round(100 * opacity)} onInput={(event) => setOpacity(Number(event.currentTarget.value) / 100)} onChange={(event) => go({ opacity: event.currentTarget.value })} /></label>
          <label><input type="checkbox" checked={grid} onChange={(event) => { setGrid(event.currentTarget.checked); go({ grid: event.currentTarget.checked ? "1" : null }); }} /> Token grid</label>
        </p>
      )}
      {completion.teacher_images?.length ? (
        <div class="taught">
          <p class="muted">As the policy sees it, and as the teacher does</p>
          <div class="pair">
            {[completion.images, completion.teacher_images].map((pictures, side) => (
              <div key={side}>
                {pictures.map((picture, index) => (
                  <img key={index} src={thumbnail(images, picture.file) ?? undefined} alt={`Image ${index + 1} of the ${side ? "teacher" : "policy"}, ${picture.width} by ${picture.height} pixels`} />
                ))}
              </div>
            ))}
          </div>
          <Taught completion={completion} />
        </div>
      ) : null}
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

/** The words that the teacher finds more or less likely by the most, and what it would say. */
function Taught({ completion }: { completion: Completion }) {
  const found = (completion.signals?.teacher_gap ?? [])
    .flatMap((gap, token) => (gap ? [{ gap, token }] : []))
    .sort((a, b) => Math.abs(b.gap) - Math.abs(a.gap))
    .slice(0, MOST_CHANGED);
  if (!found.length) return null;
  return (
    <ul class="changed" aria-label="Words on which teacher and policy differ most">
      {found.map(({ gap, token }) => (
        <li key={token}><b>{visible(completion.tokens[token]!).trim() || "␣"}</b> × {number(Math.exp(gap), 2)} to the teacher, who would say {saying(completion, token)}</li>
      ))}
    </ul>
  );
}

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
