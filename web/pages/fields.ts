/** The fields of a kind's payload, made from its schema where that is plain, and read back. */
import { html } from "hono/html";
import { z } from "zod";
import type { Kind } from "../../jobs/kind.ts";
import { Problem } from "../problem.ts";
import type { Markup } from "./layout.ts";

/** One field, as JSON Schema has it. */
interface Field {
  name: string;
  label: string;
  type: "string" | "number" | "integer" | "boolean";
  required: boolean;
  choices?: string[];
  min?: number;
  max?: number;
  description?: string;
}

type Schema = {
  type?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  enum?: unknown[];
  title?: string;
  description?: string;
  minimum?: number;
  maximum?: number;
  maxLength?: number;
};

const plain = ["string", "number", "integer", "boolean"];

/** A payload's fields, or null where only JSON says it: it is no object of plain values. */
export function fieldsOf({ payload }: Kind): Field[] | null {
  let schema: Schema;
  try {
    schema = z.toJSONSchema(payload, { io: "input" }) as Schema;
  } catch {
    return null; // it has a part that JSON Schema cannot say
  }
  const properties = Object.entries(schema.properties ?? {});
  if (schema.type !== "object" || properties.length === 0) return null;
  if (properties.some(([, it]) => !plain.includes(it.type ?? ""))) return null;
  return properties.map(([name, it]) => ({
    name,
    label: it.title ?? wordsOf(name),
    type: it.type as Field["type"],
    required: schema.required?.includes(name) ?? false,
    ...(it.enum && { choices: it.enum.map(String) }),
    min: it.minimum,
    max: it.type === "string" ? it.maxLength : it.maximum,
    description: it.description,
  }));
}

const wordsOf = (name: string) => {
  const words = name.replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
};

/** The inputs for a payload; `given`: what was in them when the form came back. */
export function inputs(kind: Kind, given: Record<string, string>): Markup {
  const fields = fieldsOf(kind);
  if (!fields) {
    return html`
      <label for="payload">Payload, as JSON</label>
      <textarea id="payload" name="payload" rows="6" spellcheck="false">${given.payload ??
        "{}"}</textarea>
    `;
  }
  return html`${fields.map((field) => input(field, given[`payload.${field.name}`]))}`;
}

function input(field: Field, given: string | undefined): Markup {
  const { name, label, type, required, choices, min, max, description } = field;
  const id = `payload-${name}`;
  const full = `payload.${name}`;
  const needed = required && type !== "boolean" ? html`required` : "";
  const hint = description ??
    (type === "string" || min === undefined || max === undefined || min < -1e9
      ? ""
      : `From ${min} to ${max}.`);
  const described = hint ? html`aria-describedby="${id}-hint"` : "";
  if (type === "boolean") {
    return html`
      <label
        class="check"><input type="checkbox" name="${full}" value="yes" ${given
          ? "checked"
          : ""} /> ${label}</label>
    `;
  }
  return html`
    <label for="${id}">${label}${required ? "" : html`
      <span class="muted">(optional)</span>
    `}</label>
    ${choices
      ? html`<select id="${id}" name="${full}" ${needed} ${described}>
        ${required ? "" : html`<option value=""></option>`}
        ${choices.map((it) => html`<option ${it === given ? "selected" : ""}>${it}</option>`)}
      </select>`
      : type === "string"
      ? html`
        <input id="${id}" name="${full}" value="${given ?? ""}" ${needed} ${described}
          ${max === undefined ? "" : html`maxlength="${max}"`} />
      `
      : html`
        <input id="${id}" name="${full}" value="${given ?? ""}" type="number" ${needed} ${described}
          step="${type === "integer" ? "1" : "any"}" ${min === undefined ? "" : html`min="${min}"`}
          ${max === undefined ? "" : html`max="${max}"`} />
      `}
    ${hint && html`<p class="hint" id="${id}-hint">${hint}</p>`}
  `;
}

/** The payload that a form's fields say; what fits its schema is checked later. @throws Problem 422 */
export function payloadOf(kind: Kind | undefined, given: Record<string, string>): unknown {
  const fields = kind && fieldsOf(kind);
  if (!fields) {
    try {
      return JSON.parse(given.payload || "{}");
    } catch (error) {
      const rule = `it must be JSON: ${(error as Error).message}`;
      throw new Problem(422, `payload: ${rule}`, { errors: [{ field: "payload", rule }] });
    }
  }
  const payload: Record<string, unknown> = {};
  for (const { name, type } of fields) {
    const value = given[`payload.${name}`];
    if (type === "boolean") payload[name] = value === "yes";
    else if (value) payload[name] = type === "string" ? value : Number(value);
  }
  return payload;
}
