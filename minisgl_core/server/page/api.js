// The list of routes, from /openapi.json.

import { make } from "./markdown.js";

const at = (id) => document.getElementById(id);

export async function showRoutes(call) {
  at("base").textContent = new URL("v1", location.href.split("#")[0]).href;
  if (at("routes").childElementCount) return;
  const answer = await call("openapi.json").catch(() => null);
  if (!answer?.ok) return; // the notice says what is wrong; the next visit tries again
  const document = await answer.json();
  const routes = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) => routeOf(document, method, path, route)),
  );
  at("routes").replaceChildren(...routes);
}

function routeOf(document, method, path, { description, parameters = [], requestBody }) {
  const schema = resolve(document, requestBody?.content?.["application/json"]?.schema);
  const required = new Set(schema?.required ?? []);
  const fields = [
    ...parameters.map((one) => [one.name, one.schema, one.required, one.description]),
    ...Object.entries(schema?.properties ?? {}).map(([name, one]) => [name, one, required.has(name), one.description]),
  ];
  const head = make(
    "summary",
    {},
    make("span", { class: "method" }, method.toUpperCase()),
    make("span", { class: "path" }, path),
    make("span", { class: "about" }, description ?? ""),
  );
  const details = make("details", {}, head);
  if (fields.length) details.append(table(document, fields));
  else details.append(make("p", { class: "quiet" }, "It takes no fields."));
  return details;
}

function table(document, fields) {
  const rows = fields.map(([name, schema, required, description]) =>
    make(
      "tr",
      {},
      make("td", {}, make("code", {}, name)),
      make("td", {}, typeOf(document, schema)),
      make("td", {}, required ? "required" : ""),
      make("td", {}, description ?? ""),
    ),
  );
  return make("table", {}, make("thead", {}, make("tr", {}, ...["Field", "Type", "", ""].map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows));
}

function resolve(document, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? document.components.schemas[name] : schema;
}

function typeOf(document, schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.map((one) => typeOf(document, one)).filter((type) => type !== "null").join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(document, schema.items) || "values"}`;
  return schema.type ?? "any";
}
