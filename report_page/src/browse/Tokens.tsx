import { autoUpdate, computePosition, flip, offset, shift } from "@floating-ui/dom";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Quantity, positions, tokenStyle } from "../colours";
import type { Completion, Numbers } from "../data";
import { number, visible } from "../format";
import { useDark } from "../hooks";

interface Props {
  completion: Completion;
  quantity: Quantity;
  chosen: number[];
  /** `beside`: next to the one that is chosen, to compare them. */
  onChoose: (token: number | null, beside: boolean) => void;
}

export function Tokens({ completion, quantity, chosen, onChoose }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const tip = useRef<HTMLDivElement>(null);
  const [pointed, setPointed] = useState<number | null>(null); // under the cursor or focused
  const [stop, setStop] = useState(0); // the one that Tab reaches
  const dark = useDark();
  const { tokens } = completion;
  const values: Numbers | null = quantity.of(completion) ?? null;
  const styles = useMemo(
    () => (values ? positions(values, quantity.ratio).map((position) => tokenStyle(position, dark)) : []),
    [values, quantity, dark],
  );
  useEffect(() => { setPointed(null); setStop(0); }, [completion]);

  const at = (index: number) => box.current?.children[index] as HTMLElement | undefined;
  useEffect(() => {
    const token = pointed === null ? undefined : at(pointed);
    if (!token || !tip.current) return;
    const floating = tip.current;
    return autoUpdate(token, floating, () => {
      void computePosition(token, floating, { placement: "top", middleware: [offset(6), flip(), shift({ padding: 8 })] })
        .then(({ x, y }) => Object.assign(floating.style, { left: `${x}px`, top: `${y}px` }));
    });
  }, [pointed, completion]);

  function move(event: KeyboardEvent) {
    const last = tokens.length - 1;
    const next = {
      ArrowRight: Math.min(last, stop + 1), ArrowDown: Math.min(last, stop + 1),
      ArrowLeft: Math.max(0, stop - 1), ArrowUp: Math.max(0, stop - 1), Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") onChoose(null, false);
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onChoose(stop, event.shiftKey);
    }
    if (next === undefined) return;
    event.preventDefault();
    setStop(next);
    at(next)?.focus();
  }

  // Kept while only the pointer moves: there may be thousands of tokens.
  const shown = useMemo(
    () => tokens.map((token, i) => (
      <span key={i} role="button" class="token" style={styles[i]} tabIndex={i === stop ? 0 : -1} aria-pressed={chosen.includes(i)}
        aria-label={`${visible(token)}, ${quantity.title} ${number(values?.[i])}`}
        onPointerEnter={() => setPointed(i)} onFocus={() => { setPointed(i); setStop(i); }} onBlur={() => setPointed(null)}
        onClick={(event) => onChoose(i, event.shiftKey)}>
        {visible(token)}
      </span>
    )),
    [tokens, styles, values, quantity, stop, chosen, onChoose],
  );
  const pointedToken = pointed !== null && pointed < tokens.length ? pointed : null;
  return (
    <div class="tokens-frame">
      <div ref={box} class="tokens" role="group" aria-label={`Tokens, coloured by ${quantity.title}. Arrow keys move, Enter chooses, Shift and Enter a second one to compare, Escape shows all.`}
        onKeyDown={move} onPointerLeave={() => setPointed(null)}>
        {shown}
      </div>
      {tokens.length === 0 && <p class="empty">The completion has no tokens.</p>}
      <div ref={tip} class="tip" role="tooltip" hidden={pointedToken === null}>
        {pointedToken !== null && (
          <>
            <b>{quantity.title} {number(values?.[pointedToken])}</b>
            <span>token {pointedToken + 1} of {tokens.length}</span>
            {values?.[pointedToken] === null && <span>infinite or not defined</span>}
            {completion.teacher && <span>the teacher would say {saying(completion, pointedToken)}</span>}
          </>
        )}
      </div>
    </div>
  );
}

/** What the teacher would have said in the place of a token. */
export function saying({ tokens, teacher }: Completion, token: number): string {
  const own = teacher?.[token] ?? "";
  return own === tokens[token] ? "the same" : `“${visible(own).trim() || "␣"}”`;
}

export function Scale({ completion, quantity }: { completion: Completion; quantity: Quantity }) {
  const dark = useDark();
  const values = (quantity.of(completion) ?? []).filter((value) => value !== null);
  if (!values.length) return <p class="muted">{quantity.title} was not measured for this completion.</p>;
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const [steps, below, above] = quantity.twoSided || (low < 0 && high > 0)
    ? [[-1, -0.5, 0, 0.5, 1], "blue", "orange"] as const
    : low < 0 ? [[-1, -0.5, 0], "blue", "pale"] as const : [[0, 0.5, 1], "pale", "orange"] as const;
  return (
    <p class="scale">
      {quantity.title} is {number(low)} to {number(high)} here;{" "}
      <span class="steps" aria-hidden="true">{steps.map((step) => <i key={step} style={tokenStyle(step, dark)} />)}</span>{" "}
      {below}: {quantity.below}, {above}: {quantity.above}.
    </p>
  );
}
