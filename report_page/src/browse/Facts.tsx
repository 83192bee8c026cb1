import type { Completion } from "../data";
import { number, visible } from "../format";

const METRICS: [string, string][] = [
  ["vgr", "VGR"],
  ["aei_vision", "AEI vision"],
  ["aei_instruction", "AEI instruction"],
  ["mdi_balance", "MDI balance"],
  ["attention_vision", "attention on vision"],
  ["attention_instruction", "on instruction"],
];

export function Rewards({ completion }: { completion: Completion }) {
  return (
    <div class="scroll">
      <table>
        <caption>Rewards</caption>
        <tbody>
          {Object.entries(completion.rewards).map(([name, value]) => (
            <tr key={name}><th scope="row">{visible(name)}</th><td>{number(value)}</td></tr>
          ))}
          <tr class="sum"><th scope="row">weighted sum</th><td>{number(completion.reward)}</td></tr>
          <tr><th scope="row">advantage</th><td>{number(completion.advantage)}</td></tr>
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
    <div class="scroll">
      <table>
        <caption>Attention by segment of layers</caption>
        <thead><tr><th scope="col">segment</th>{shown.map(([name, title]) => <th key={name} scope="col">{title}</th>)}</tr></thead>
        <tbody>
          {Object.entries(metrics).map(([segment, values]) => (
            <tr key={segment}>
              <th scope="row">{visible(segment)}</th>
              {shown.map(([name]) => <td key={name}>{number(values[name], 3)}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
