import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { App } from "./App";
import { readData } from "./data";

const root = document.getElementById("page")!;

try {
  const data = await readData();
  document.title = `${data.runs.map((run) => run.name).join(", ")} – report`;
  root.textContent = "";
  render(<App data={data} />, root);
} catch (error) {
  root.textContent = `This page cannot show its data (${error}): open it in a current browser, or write it anew.`;
}
