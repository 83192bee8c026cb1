import { type Completion, type Data, thumbnail } from "../data";
import { percent, visible } from "../format";
import { look, written } from "./attention";

/** A name for each image; that of a tool's says which call returned it. */
export function captions({ images, turns = [] }: Completion): string[] {
  const shown = turns.reduce((count, turn) => count - turn.images, images.length); // in the prompt
  const calls = turns.flatMap(({ calls, images: count }, index) => Array.from({ length: count }, () => `turn ${index + 1}, ${visible(calls.join("; "))}`));
  return images.map((_, index) => [images.length > 1 ? `Image ${index + 1}` : "Image", calls[index - shown]].filter(Boolean).join(", "));
}

interface Props {
  completion: Completion;
  images: Data["images"];
  turn: number | null;
  onChoose: (turn: number | null) => void;
}

/** The turns of a completion: what each called, what came back, and how much it looked at the images. */
export function Turns({ completion, images, turn: chosen, onChoose }: Props) {
  const turns = completion.turns ?? [];
  if (turns.length < 2) return null;
  let next = turns.reduce((count, turn) => count - turn.images, completion.images.length);
  return (
    <ol class="turns" aria-label="Turns">
      {turns.map((turn, index) => {
        const seen = look(completion, written(completion, index));
        const returned = completion.images.slice(next, (next += turn.images));
        return (
          <li key={index}>
            <button type="button" aria-pressed={chosen === index} onClick={() => onChoose(chosen === index ? null : index)}>Turn {index + 1}</button>
            <span>
              {turn.calls.map((call, number) => <code key={number}>{visible(call)}</code>)}
              {!turn.calls.length && <span class="muted">calls no tool</span>}
              {seen && <span class="muted share">{percent(seen.mass)} of its attention is on the images</span>}
              {turn.answers.map((answer) => answer.replaceAll("<image>", "").trim()).filter(Boolean).map((answer, number) => <span key={number} class="answer">{visible(answer)}</span>)}
            </span>
            {returned.map((picture, number) => {
              const source = thumbnail(images, picture.file);
              return source && <img key={number} src={source} alt={`Returned in turn ${index + 1}`} />;
            })}
          </li>
        );
      })}
    </ol>
  );
}
