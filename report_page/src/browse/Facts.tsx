import type { Completion } from "../data";
import { number, visible } from "../format";

const METRICS: [string, string][] = [
  ["vgr", "VGR"],
  ["aei_vision", "AEI vision"],
  ["aei_instruction", "AEI instruction"],
  ["mdi_balance", "MDI balance"],
  ["attention_vision", "on the image"],
  ["attention_instruction", "on the instruction"],
];

export function Rewards({ completion, weights }: { completion: Completion; weights: Record<string, number> }) {
  const weighted = Object.keys(weights).length > 0;
  return (
    <div class="facts scroll">
      <table>
        <caption>Rewards</caption>
        {weighted && <thead><tr><th scope="col"><span class="sr">reward</span></th><th scope="col">value</th><th scope="col">weight</th></tr></thead>}
        <tbody>
          {Object.entries(completion.rewards).map(([name, value]) => (
            <tr key={name}><th scope="row">{visible(name)}</th><td>{number(value)}</td>{weighted && <td>× {number(weights[name])}</td>}</tr>
          ))}
          {completion.reward !== null && <tr class="sum"><th scope="row">weighted sum</th><td>{number(completion.reward)}</td></tr>}
          {completion.advantage !== null && <tr><th scope="row">advantage</th><td>{number(completion.advantage)}</td></tr>}
        </tbody>
      </table>
    </div>
  );
}

export function Metrics({ completion }: { completion: Completion }) {
  const { metrics } = completion;
  if (!metrics) return null;
  const shown = METRICS.filter(([name]) => Object.values(metrics).some((values) => name in values));
  return (
    <div class="facts scroll">
      <table>
        <caption>Attention by segment of layers</caption>
        <thead><tr><th scope="col">layers</th>{Object.keys(metrics).map((segment) => <th key={segment} scope="col">{visible(segment)}</th>)}</tr></thead>
        <tbody>
          {shown.map(([name, title]) => (
            <tr key={name}>
              <th scope="row">{title}</th>
              {Object.entries(metrics).map(([segment, values]) => <td key={segment}>{number(values[name], 3)}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
