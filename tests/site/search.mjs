// SPDX-License-Identifier: Apache-2.0
import {readFileSync} from "node:fs";
const [worker, index, ...searches] = process.argv.slice(2);
const {config, items} = JSON.parse(readFileSync(index, "utf8"));
let answer;
globalThis.self = globalThis;
globalThis.postMessage = (message) => answer(message);
const ask = (type, data) => new Promise((resolve) => {
  answer = resolve;
  self.onmessage({data: {type, data}});
});
(0, eval)(readFileSync(worker, "utf8"));
await ask(0, {config, items});
const found = {};
for (const input of searches) {
  const operator = {type: "operator", data: {operator: "and", operands: []}};
  const filter = {input: operator, aggregation: {input: []}};  // the worker changes it
  const {data} = await ask(2, {input, filter});
  found[input] = data.items.map(({id}) => items[id].location.split("#")[0]);
}
console.log(JSON.stringify(found));
